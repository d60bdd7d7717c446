"""ZB-H1: as 1F1B, but the weight gradient of micro-batch k is computed s backward passes later.

Source: Qi et al., arXiv:2401.10241, table 1. Equal stages take m (f + b) + (p - 1) (f + b - 2 w)
where w <= f and w <= b / 2: p - 1 bubbles, each a pass less twice its weight part.
"""

from __future__ import annotations

from autopar.order.positions import longest_path
from autopar.order.times import Times

from .one_f_one_b import words as one_f_one_b
from .row import OtherNames, PipelineSchedule, TorchClass


def _words(stage: int, stages: int, micro_batches: int, interleave: int) -> str:
    late = min(stage, micro_batches)
    passes = one_f_one_b(stage, stages, micro_batches, interleave)
    # The first `late` backward passes put their weight gradients off, each later one makes up for
    # one of them, and the rest are made at the end.
    return passes.replace("B", "I", late).replace("B", "IW") + "W" * late


def _seconds(times: Times, micro_batches: int, interleave: int) -> float:
    """The longest path over positions. Exact."""
    t = times.held(interleave)
    return longest_path(t.forward, t.backward - t.weight, t.weight, t.send, micro_batches)


SCHEDULE = PipelineSchedule(
    name="zero_bubble",
    description="as 1f1b; the weight gradients of stage s are made s backward passes later",
    source="Qi et al., arXiv:2401.10241",
    year=2024,
    words=_words,
    seconds=_seconds,
    bubble=lambda stages, weight, interleave: (stages - 1.0) * max(1.0 - 2.0 * weight, 0.0),
    preferred=3,
    # With one chunk a stage, torch's class has the order of ZB-H1.
    other_names=OtherNames(
        torch=TorchClass(name="ScheduleInterleavedZeroBubble", several=True),
        torchtitan_alike=("interleavedzerobubble", "zbvzerobubble"),
    ),
)
