"""Buffers that a PyTorch model changes as it runs.

The running statistics of batch norms, counters, averages.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

RUNNING = ("running_mean", "running_var")


def tracked(target: torch._ops.OpOverload, given: Mapping[str, Any]) -> bool:
    """Whether a call is a batch norm whose schema hides that it writes its running statistics."""
    return (
        target is torch.ops.aten.batch_norm.default
        and bool(given.get("training"))
        and given.get("running_mean") is not None
    )


def functional(given: Mapping[str, Any]) -> tuple[torch._ops.OpOverload, dict[str, Any]]:
    """The form that gives the new statistics as its fourth and fifth result, and its arguments."""
    arguments = {name: value for name, value in given.items() if name != "cudnn_enabled"}
    return torch.ops.aten._native_batch_norm_legit_functional.default, arguments
