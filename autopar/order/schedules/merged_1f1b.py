"""Merged 1F1B: each backward pass runs together with the forward pass of another micro-batch.

In the pair, exchanges of experts in one pass run under the other. Both are ready together if stage
s makes 2 (p - 1 - s) + (v - 1) p + 1 forward passes first, one more than the interleaved schedule:
a backward pass follows its forward pass on the last stage in the next turn, not in the same. So one
chunk a stage keeps about twice as much in flight as 1F1B.

Source: DeepSeek-AI, arXiv:2412.19437, 3.2.1, for the pairs; here a model is on its devices once.

With c the seconds of a pair equal stages take p (f + b) + (m v - (v - 1) p - 1) c / v. Passes lie
on a grid: in turn t stage s makes its forward pass t - s and its backward pass t + s + 1 - (v + 1)
p, behind the turn before of its own and of the stages that send to it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.order.times import Floats, Times

from .interleaved import visits
from .row import OtherNames, PipelineSchedule

Flags = NDArray[np.bool_]
ROUNDING = 1e-13
"""The share of the step up to which a difference is rounding."""


def _words(stage: int, stages: int, micro_batches: int, interleave: int) -> str:
    passes = micro_batches * interleave
    warm = min(2 * (stages - 1 - stage) + (interleave - 1) * stages + 1, passes)
    return "F" * warm + "M" * (passes - warm) + "B" * warm


def _refuses(stages: int, micro_batches: int, interleave: int) -> str:
    if micro_batches < 2:
        return "one micro-batch has no other one to be merged with"
    if interleave > 1 and micro_batches % stages:
        return (
            f"{micro_batches} micro-batches are no multiple of {stages} stages, which merged "
            "passes of several chunks a stage need"
        )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Grid:
    """The passes of all stages in each turn, as arrays [turns, stages].

    `goes`, `returns`: whether there is a forward, and a backward, pass. `takes`, `gives`: whether
    the forward pass gets values from another stage, and sends some; `takes_back`, `gives_back`: the
    same of gradients. `paired`: the turns in which every stage has a pair.
    """

    goes: Flags
    returns: Flags
    takes: Flags
    gives: Flags
    takes_back: Flags
    gives_back: Flags
    paired: range

    @classmethod
    def of(cls, stages: int, passes: int, chunks: int) -> _Grid:
        """The grid of stages that each make so many passes in both directions."""
        first_back = (chunks + 1) * stages - 1
        turn = np.arange(first_back + passes)[:, None]
        stage = np.arange(stages)
        ahead = turn - stage
        back = turn + stage - first_back
        goes = (ahead >= 0) & (ahead < passes)
        returns = (back >= 0) & (back < passes)
        chunk = ahead // stages % chunks
        behind = back // stages % chunks
        return cls(
            goes=goes,
            returns=returns,
            # Nothing comes into the model's first chunk, and nothing leaves its last one.
            takes=goes & ((stage > 0) | (chunk > 0)),
            gives=goes & ((stage < stages - 1) | (chunk < chunks - 1)),
            takes_back=returns & ((stage < stages - 1) | (behind > 0)),
            gives_back=returns & ((stage > 0) | (behind < chunks - 1)),
            paired=range(first_back, passes),
        )


# The cuts of a model are many for the same numbers of stages, micro-batches and chunks.
_grid = functools.lru_cache(maxsize=64)(_Grid.of)


def _seconds(times: Times, micro_batches: int, interleave: int) -> float:
    """The longest path over the grid. Exact.

    Once all ends grow equally over a period in which every stage has pairs, they do so as long as
    this lasts (max-plus periodicity), and the remaining periods are added at once.
    """
    stages = len(times.forward)
    grid = _grid(stages, micro_batches * interleave, interleave)
    work, into, home, sends = _arrays(times, grid, interleave)
    active = grid.goes | grid.returns
    above = np.arange(stages) - 1
    below = np.arange(1, stages + 1) % stages
    # Values go around two neighbouring stages, or wait for one; chunks go around all.
    period = 2 if interleave == 1 else int(np.lcm(interleave * stages, 2))
    ends = free = np.zeros(stages)
    before = np.zeros(2 * stages)
    turn = 0
    while turn < len(work):
        into_paired = turn - grid.paired.start
        if turn <= grid.paired.stop and into_paired >= 0 and into_paired % period == 0:
            now = np.concatenate((ends, free))
            grown = now - before
            before = now
            if into_paired and np.ptp(grown) <= ROUNDING * ends.max():
                periods = (grid.paired.stop - turn) // period
                ends = ends + periods * grown[0]
                free = free + periods * grown[0]
                turn += periods * period
                before = np.full(2 * stages, -np.inf)
        done = np.maximum(free, np.maximum(ends[above] + into[turn], ends[below] + home[turn]))
        done += work[turn]
        ends = np.where(active[turn], done, ends)
        free = done + sends[turn]
        turn += 1
    return float(ends.max())


def _arrays(times: Times, grid: _Grid, chunks: int) -> tuple[Floats, Floats, Floats, Floats]:
    """Arrays [turns, stages] of seconds: of passes, messages into them, and of sending stages.

    The messages with values come first, then those with gradients.
    """
    alone = np.where(grid.goes, times.forward, np.where(grid.returns, times.backward, 0.0))
    work = np.where(grid.goes & grid.returns, times.pair, alone) / chunks
    # A gradient comes back over the link on which the values went.
    to_above = np.roll(times.send, 1)
    into = np.where(grid.takes, to_above, -np.inf)
    home = np.where(grid.takes_back, times.send, -np.inf)
    if times.overlap:
        return work, into, home, np.zeros_like(work)
    values = np.where(grid.gives, times.send, 0.0)
    # A stage that waits for its messages sends gradients behind values.
    home[1:] += np.roll(values[:-1], -1, axis=1)
    return work, into, home, values + np.where(grid.gives_back, to_above, 0.0)


SCHEDULE = PipelineSchedule(
    name="merged_1f1b",
    description="pairs of a forward and a backward pass, merged, so that exchanges of experts hide",
    source="DeepSeek-AI, arXiv:2412.19437",
    year=2024,
    words=_words,
    visits=visits,
    seconds=_seconds,
    bubble=lambda stages, weight, interleave: (stages - 1.0) / interleave,
    preferred=5,
    chunks=(1, 2, 3, 4, 6, 8),
    refuses=_refuses,
    other_names=OtherNames(megatron=True),
)
