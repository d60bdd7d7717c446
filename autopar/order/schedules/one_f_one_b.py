"""1F1B: p - 1 - s forward passes on stage s, then forward and backward in turns.

Source: Narayanan et al., arXiv:2104.04473, 2.2.1. Equal stages take (m + p - 1) (f + b); unequal ones the longest path
of `autopar.order.positions`.
"""

from __future__ import annotations

import numpy as np

from ..positions import Floats, longest_path
from ..times import Times
from .row import PipelineSchedule, turns


def words(stage: int, stages: int, micro_batches: int, interleave: int) -> str:
    """The passes of a stage."""
    return turns(min(stages - 1 - stage, micro_batches), micro_batches)


def _seconds(times: Times, micro_batches: int, interleave: int) -> float:
    """The longest path over positions. Exact."""
    t = times.held(interleave)
    stages = len(t.forward)
    if micro_batches >= 2 * stages and not t.send[:-1].any():
        return _without_sends(t.forward, t.backward, micro_batches)
    return longest_path(t.forward, t.backward, np.zeros(stages), t.send, micro_batches)


def _without_sends(forward: Floats, backward: Floats, micro_batches: int) -> float:
    """A path stays on one stage h but at its ends, where it may come up from, or go down to, a stage below."""
    both = forward + backward
    total = np.cumsum(both)
    number = np.arange(len(both))
    rest = number[::-1]
    ahead = np.maximum.accumulate((total + rest * np.maximum.accumulate(forward))[::-1])[::-1]
    back = np.maximum.accumulate((total + rest * np.maximum.accumulate(backward))[::-1])[::-1]
    return float((ahead + back - total + (micro_batches - len(both) + number) * both).max())


SCHEDULE = PipelineSchedule(
    name="1f1b",
    description="p - 1 - s forward passes on stage s, then forward and backward passes in turns",
    source="Narayanan et al., arXiv:2104.04473",
    year=2021,
    words=words,
    seconds=_seconds,
    bubble=lambda stages, weight, interleave: stages - 1.0,
    preferred=1,
)
