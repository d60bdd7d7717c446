"""A check that all ranks are given the same batches, in the first calls or in all.

A comparison costs a collective and a wait, so it ends once the caller's loop has been seen to be
right.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from autopar.runtime.ranks.agreement import agree
from autopar.runtime.ranks.contents import DIGEST, checksum

FIRST = 4
"""The number of first calls whose batches are compared among the ranks, unless all calls are."""


class Batches:
    """Compares the inputs of ranks in the first calls.

    With `debug`, or under TORCH_DISTRIBUTED_DEBUG=DETAIL, it does so in all calls.
    """

    def __init__(self, *, debug: bool) -> None:
        self.always = debug or os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
        self.calls = 0

    def agreed(
        self,
        inputs: Callable[[], dict[str, Tensor]],
        device: torch.device,
        apart: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """The inputs; all ranks raise if they differ, or if one of them refuses its own.

        `apart`: inputs that may differ.
        """
        if not self.always and self.calls >= FIRST:
            return inputs()
        self.calls += 1
        failure: Exception | None = None
        values: dict[str, Tensor] = {}
        digest = bytes(DIGEST)
        try:
            values = inputs()
            compared = (value for name, value in values.items() if name not in apart)
            digest = checksum(compared, whole=self.always)
        except Exception as error:
            # The other ranks wait in the comparison: this one tells them there.
            failure = error
        agree({"the batch": digest}, failure=failure, device=device)
        return dict(values)
