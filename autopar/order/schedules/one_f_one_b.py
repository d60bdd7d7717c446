"""1F1B: p - 1 - s forward passes on stage s, then forward and backward in turns.

Source: Narayanan et al., arXiv:2104.04473, 2.2.1. Equal stages take (m + p - 1) (f + b); unequal
ones the longest path of `autopar.order.positions`.
"""

from __future__ import annotations

import numpy as np

from autopar.order.positions import Floats, longest_path
from autopar.order.times import Times

from .row import OtherNames, PipelineSchedule, TorchClass, turns


def words(stage: int, stages: int, micro_batches: int, interleave: int) -> str:
    """The passes of a stage."""
    return turns(min(stages - 1 - stage, micro_batches), micro_batches)


def _seconds(times: Times, micro_batches: int, interleave: int) -> float:
    """The longest path over positions. Exact."""
    t = times.held(interleave)
    stages = len(t.forward)
    # With this many, every stage has turns between both ends, as the shorter form presupposes.
    if micro_batches >= 2 * stages and not t.send[:-1].any():
        return _without_sends(t.forward, t.backward, micro_batches)
    return longest_path(t.forward, t.backward, np.zeros(stages), t.send, micro_batches)


def _without_sends(forward: Floats, backward: Floats, micro_batches: int) -> float:
    """The longest path without sends, which stays on one stage h but at its ends.

    There it may come up from a stage below, or go down to one.
    """
    both = forward + backward
    total = np.cumsum(both)
    number = np.arange(len(both))
    rest = number[::-1]
    ahead = np.maximum.accumulate((total + rest * np.maximum.accumulate(forward))[::-1])[::-1]
    back = np.maximum.accumulate((total + rest * np.maximum.accumulate(backward))[::-1])[::-1]
    return float((ahead + back - total + (micro_batches - len(both) + number) * both).max())


def _torch_refuses(stages: int, micro_batches: int) -> str:
    if micro_batches >= stages:
        return ""
    return (
        f"1f1b with {micro_batches} micro-batches on {stages} stages, of which there must be at "
        "least as many"
    )


SCHEDULE = PipelineSchedule(
    name="1f1b",
    description="p - 1 - s forward passes on stage s, then forward and backward passes in turns",
    source="Narayanan et al., arXiv:2104.04473",
    year=2021,
    words=words,
    seconds=_seconds,
    bubble=lambda stages, weight, interleave: stages - 1.0,
    preferred=1,
    scheme=True,
    other_names=OtherNames(
        torch=TorchClass(name="Schedule1F1B", refuses=_torch_refuses),
        torchtitan="1F1B",
        megatron=True,
    ),
)
