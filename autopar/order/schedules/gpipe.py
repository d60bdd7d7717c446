"""GPipe: all forward passes, then all backward passes (Huang et al., arXiv:1811.06965).

Equal stages take (m + p - 1) (f + b).
"""

from __future__ import annotations

from autopar.order.times import Times

from .row import OtherNames, PipelineSchedule, TorchClass


def _words(stage: int, stages: int, micro_batches: int, interleave: int) -> str:
    return "F" * micro_batches + "B" * micro_batches


def _seconds(times: Times, micro_batches: int, interleave: int) -> float:
    """Two flow shops of equal jobs, one after the other. Exact.

    A flow shop takes the sum over its stages + (m - 1) times the slowest.
    """
    t = times.held(interleave)
    once = t.forward.sum() + t.backward.sum() + 2 * t.send[:-1].sum()
    return float(once + (micro_batches - 1) * (t.forward.max() + t.backward.max()))


SCHEDULE = PipelineSchedule(
    name="gpipe",
    description="all forward passes, then all backward passes",
    source="Huang et al., arXiv:1811.06965",
    year=2018,
    words=_words,
    seconds=_seconds,
    bubble=lambda stages, weight, interleave: stages - 1.0,
    preferred=4,
    scheme=True,
    other_names=OtherNames(torch=TorchClass(name="ScheduleGPipe"), torchtitan="GPipe"),
)
