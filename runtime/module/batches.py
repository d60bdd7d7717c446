"""A check that all ranks are given the same batches, in the first calls and some later, or in all.

A comparison costs a collective and a wait, so most calls go without one. Calls under `no_grad`
count apart: an evaluation must not use up what training needs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from autopar.runtime.ranks.agreement import agree
from autopar.runtime.ranks.contents import DIGEST, checksum

FIRST = 4
EVERY = 100
"""How many first calls, and which later ones, have their batches compared, unless all have."""


class Batches:
    """Compares the inputs of ranks in the first calls, and in one of `EVERY` later.

    With `debug`, or under TORCH_DISTRIBUTED_DEBUG=DETAIL, it does so in all calls.
    """

    def __init__(self, *, debug: bool) -> None:
        self.always = debug or os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
        # By whether gradients are wanted.
        self.calls = {True: 0, False: 0}

    def agreed(
        self,
        inputs: Callable[[], dict[str, Tensor]],
        device: torch.device,
        apart: Collection[str] = (),
    ) -> dict[str, Tensor]:
        """The inputs; all ranks raise if they differ, or if one of them refuses its own.

        `apart`: inputs that may differ.
        """
        trained = torch.is_grad_enabled()
        number = self.calls[trained]
        self.calls[trained] += 1
        if not self.always and number >= FIRST and number % EVERY:
            return inputs()
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
