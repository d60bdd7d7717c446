"""Interleaved 1F1B: chunk passes in groups of p micro-batches.

2 (p - 1 - s) + (v - 1) p of them come before the turns of 1F1B.

Source: Narayanan et al., arXiv:2104.04473, 2.2.2. Equal stages take m (f + b) + (p - 1) (f + b) /
v. The first stage keeps p (1 + (p - 1) / (p v)) micro-batches in flight.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.order.times import Floats, Times

from .row import OtherNames, PipelineSchedule, TorchClass, Visits, turns


def _warm(stage: int, stages: int, micro_batches: int, interleave: int) -> int:
    return min(2 * (stages - 1 - stage) + (interleave - 1) * stages, micro_batches * interleave)


def _words(stage: int, stages: int, micro_batches: int, interleave: int) -> str:
    return turns(_warm(stage, stages, micro_batches, interleave), micro_batches * interleave)


def visits(stages: int, micro_batches: int, interleave: int) -> Visits:
    """Groups of p micro-batches pass through chunk 0, then chunk 1, ..."""
    groups = range(0, micro_batches, stages)
    return [
        (chunk, member)
        for first in groups
        for chunk in range(interleave)
        for member in range(first, min(first + stages, micro_batches))
    ]


def _refuses(stages: int, micro_batches: int, interleave: int) -> str:
    uneven = (
        f"{micro_batches} micro-batches are no multiple of {stages} stages, which the interleaved "
        "schedule needs"
    )
    return uneven if micro_batches % stages else ""


def _seconds(times: Times, micro_batches: int, interleave: int) -> float:
    """The longest path that stays on one stage h except near both ends.

    It is exact for equal stages with short sends.

    With positions as in 1F1B a step down takes two positions, so no path gains by taking one in the
    middle. `_entries` lists the ways into stage h and out of it.
    """
    p = len(times.forward)
    m = micro_batches
    v = interleave
    f = times.forward / v
    b = times.backward / v
    send = times.send
    held = times.held(v)  # of a stage that works all the time
    busy_f = held.forward / v
    busy_b = held.backward / v
    hold = busy_f + busy_b
    warm = np.array([_warm(stage, p, m, v) for stage in range(p)])
    alternating = m * v - warm
    # Then the last stage passes a later micro-batch on to the first one's next chunk.
    around = v > 1 and m >= 2 * p
    warm_up = _WarmUp(passes=warm, chunks=v, send=send, hold=hold, around=around)
    enter = _entries(warm_up, f, b, busy_f)
    leave = _entries(warm_up, b, f, busy_b)
    best = 0.0
    for before, spent in enter:
        for after, left in leave:
            rest = alternating - spent - left
            best = max(best, float(np.where(rest >= 0, before + rest * hold + after, 0.0).max()))
    return best


@dataclass(frozen=True, slots=True, kw_only=True)
class _WarmUp:
    """The start of a step, which its end mirrors.

    `passes`: chunk passes of each stage before its turns. `hold`: seconds of a turn of each stage
    that works all the time. `around`: whether a path may go around all stages in the turns, too.
    """

    passes: NDArray[np.int64]
    chunks: int
    send: Floats
    hold: Floats
    around: bool


def _entries(
    warm_up: _WarmUp, ahead: Floats, back: Floats, busy: Floats
) -> list[tuple[Floats, NDArray[np.int64]]]:
    """The longest paths from the start to every stage, and how many of its turns they use.

    The end of a step mirrors its start.

    - straight: a path goes down once in the warm-up and stays on the slowest stage on its way, or
      goes around all stages for up to v - 1 chunks, p passes each;
    - below: by way of a stage below, coming up with its first backward pass, in the first turn;
    - around: p turns on the last stage, then the next chunk from the first stage down.
    """
    stages = len(ahead)
    send = warm_up.send
    warm = warm_up.passes
    number = np.arange(stages)
    above = np.concatenate(([0.0], np.cumsum(ahead[:-1] + send[:-1])))
    straight: Floats = np.asarray(above + warm * np.maximum.accumulate(busy), dtype=np.float64)
    # The length is linear in the number of rounds, so only the fewest and the most are tried.
    for ring in {1, warm_up.chunks - 1} - {0}:
        rest = warm - ring * stages
        through = above + ring * float(ahead.sum() + send.sum()) + rest * busy.max()
        straight = np.where(rest >= 0, np.maximum(straight, through), straight)
    climbed = np.cumsum(back) + np.concatenate(([0.0], np.cumsum(send[:-1])))
    below = np.maximum.accumulate((straight + ahead + climbed)[::-1])[::-1] - climbed + back
    entries = [(straight, 0 * number), (below, 0 * number + 1)]
    if warm_up.around:
        wrap = float(straight[-1] + stages * warm_up.hold[-1] + ahead[-1] + send[-1])
        entries.append((wrap + above, 2 * number + 2))
    return entries


def _torch_refuses(stages: int, micro_batches: int) -> str:
    if micro_batches % stages == 0:
        return ""
    return (
        f"interleaved with {micro_batches} micro-batches, which are no multiple of {stages} stages"
    )


SCHEDULE = PipelineSchedule(
    name="interleaved",
    description="as 1f1b with v chunks of the model a stage, in groups of p micro-batches",
    source="Narayanan et al., arXiv:2104.04473",
    year=2021,
    words=_words,
    visits=visits,
    seconds=_seconds,
    bubble=lambda stages, weight, interleave: (stages - 1.0) / interleave,
    preferred=2,
    chunks=(2, 3, 4, 6, 8),
    refuses=_refuses,
    other_names=OtherNames(
        torch=TorchClass(name="ScheduleInterleaved1F1B", several=True, refuses=_torch_refuses),
        torchtitan="Interleaved1F1B",
        megatron=True,
    ),
)
