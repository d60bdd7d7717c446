"""Seconds of a micro-batch on every stage: the arguments of a schedule's closed form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """Seconds of one micro-batch through all chunks of a stage, as arrays [stages].

    `forward`: the forward pass. `backward`: the whole backward pass; `weight`: the part of it that
    makes gradients of weights. `send`: a message from each stage to the next one and back; the last
    stage sends to the first, for the next chunk. `pair`: a forward pass merged with the backward
    pass of another micro-batch. `overlap`: whether a stage goes on computing while it sends;
    otherwise it waits until its message has arrived.
    """

    forward: Floats
    backward: Floats
    weight: Floats
    send: Floats
    pair: Floats
    overlap: bool = True

    @classmethod
    def of(
        cls,
        forward: Sequence[float] | Floats,
        backward: Sequence[float] | Floats,
        weight: Sequence[float] | Floats | float = 0.0,
        send: Sequence[float] | Floats | float = 0.0,
        *,
        hidden: Sequence[float] | Floats | float = 0.0,
        overlap: bool = True,
    ) -> Times:
        """Check the figures; one number for `weight`, `send` or `hidden` serves all stages.

        `hidden`: seconds that a pair takes less than both of its passes.
        """
        # Searches ask for the times of many cuts, so all figures are checked as one table.
        figures = np.empty((5, len(forward)))
        try:
            for row, x in zip(figures, (forward, backward, weight, send, hidden), strict=True):
                row[:] = x
        except ValueError:
            # A figure of another size is missed in the check below.
            figures = np.empty((5, 0))
        both = figures[0] + figures[1]
        if (
            not figures.size
            or figures.min() < 0
            or (figures[2] > figures[1]).any()
            or (figures[4] > both).any()
        ):
            raise UsageError(
                "a pipeline needs times of at least 0 for each stage, with a weight part no longer "
                "than the backward pass, and no more hidden than both passes"
            )
        return cls(
            forward=figures[0],
            backward=figures[1],
            weight=figures[2],
            send=figures[3],
            pair=both - figures[4],
            overlap=overlap,
        )

    def held(self, interleave: int) -> Times:
        """Return equivalent times in which all sends overlap.

        Without `overlap`, a send becomes work of the stage that waits for it.
        """
        if self.overlap:
            return self
        # Every chunk sends forward but the model's last, and backward but the model's first.
        often = np.full(len(self.send), interleave)
        often[-1] -= 1
        ahead = self.send * often
        # Stage s hands gradients back over the link on which stage s - 1 sends values.
        back = np.roll(self.send, 1) * often[::-1]
        return Times(
            forward=self.forward + ahead,
            backward=self.backward + back,
            weight=self.weight,
            send=np.zeros(len(self.send)),
            pair=self.pair + ahead + back,
        )
