"""Optimizers' states: states in their parameter's layout, and integers that torch would load as floats."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .piece_tensors import in_pieces


def lying_as(value: Tensor, held: Tensor) -> Tensor:
    """A tensor of the shape of a parameter's shard that lies as the parameter does."""
    if not isinstance(value, DTensor):
        return held
    shape, stride = value.shape, value.stride()
    found = DTensor.from_local(held, value.device_mesh, value.placements, run_check=False, shape=shape, stride=stride)
    found._local_tensor = held
    return in_pieces(found)


def keep_integers(optimizer: Optimizer, given: Mapping[str, Any]) -> None:
    """Restore integers after torch's `load_state_dict`, which casts all states to the type of their parameter."""
    numbers = itertools.chain.from_iterable(group["params"] for group in given["param_groups"])
    values = itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups)
    for number, value in zip(numbers, values, strict=True):
        for name, held in given["state"].get(number, {}).items():
            if isinstance(held, Tensor) and not held.is_floating_point():
                optimizer.state[value][name] = held.to(value.device).clone()
