"""Prices a pipeline: seconds of a step from those of its stages, by the schedule's closed form (`order.schedules`)."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.order.schedules import step_seconds
from autopar.order.times import Floats, Times


def pipeline_seconds(
    name: str,
    forward: Sequence[float] | Floats,
    backward: Sequence[float] | Floats,
    weight: Sequence[float] | Floats | float,
    send: Sequence[float] | Floats | float,
    micro_batches: int,
    interleave: int = 1,
    *,
    overlap_sends: bool = True,
) -> float:
    """Seconds of a step of the pipeline; the arguments are those of `Times`, per stage.

    `overlap_sends`: a stage goes on computing while it sends; otherwise it waits until its message has arrived.

    >>> pipeline_seconds("1f1b", [1.0] * 4, [2.0] * 4, 0.0, 0.0, 8)
    33.0
    """
    return step_seconds(name, Times.of(forward, backward, weight, send, overlap=overlap_sends), micro_batches, interleave)
