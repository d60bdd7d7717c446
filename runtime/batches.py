"""The batches of a planned module: all ranks must get the same ones, which is checked in the first calls, or in all."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from .agreement import DIGEST, agree, checksum

FIRST = 4
"""The number of first calls whose batches are compared among the ranks, unless all calls are."""


class Batches:
    """Compares the inputs of ranks: in all calls with `debug` or under TORCH_DISTRIBUTED_DEBUG=DETAIL."""

    def __init__(self, *, debug: bool) -> None:
        self.always = debug or os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
        self.calls = 0

    def agreed(self, inputs: Callable[[], dict[str, Tensor]], device: torch.device, apart: Collection[str] = ()) -> dict[str, Tensor]:
        """The inputs; all ranks raise if they differ (except in `apart`), or if one of them refuses its own."""
        if not self.always and self.calls >= FIRST:
            return inputs()
        self.calls += 1
        found: Mapping[str, Tensor] | None = None
        failure: Exception | None = None
        try:
            found = inputs()
        except Exception as error:
            failure = error
        alike = [value for name, value in found.items() if name not in apart] if found is not None else []
        agree({"the batch": checksum(alike) if found is not None else bytes(DIGEST)}, failure=failure, device=device)
        assert found is not None
        return dict(found)
