"""The seconds and bytes of every stage that pieces of a model may form.

A piece is a stretch of operators between two places where the model may be cut. A stage holds
pieces i to j - 1, on devices of its own kind: stages on equal devices share their figures.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.search import interval_sums

from .operator_costs import OperatorCosts
from .pieces import pieces_of
from .stage import Stage
from .stage_memory import Ints, StageMemory

Floats = NDArray[np.float64]
SUMMED = (
    *("forward", "backward", "weight", "hidden"),
    *("once", "gather", "travel", "update", "moved"),
)
"""The figures of a stage that are sums over its operators."""


class PieceCosts:
    """The figures of pieces, for each stage by the costs of operators on its devices.

    `pieces`: the operators at which pieces begin, with the end of the model. `micro_batches`: of a
    step. `cuts`: see `pieces_of`.
    """

    def __init__(
        self,
        figures: Sequence[OperatorCosts],
        micro_batches: int,
        cuts: Sequence[range] | None = None,
    ) -> None:
        self.figures = figures
        self.micro_batches = micro_batches
        # Stages on equal devices have the same object, for which everything is summed once.
        self._kinds = list(dict.fromkeys(figures))
        self._stages_of = [
            (kind, [stage for stage, own in enumerate(figures) if own is kind])
            for kind in self._kinds
        ]
        self.pieces = pieces_of(self._kinds, len(figures), cuts)
        self._memories = {kind: StageMemory(kind, self.pieces) for kind in self._kinds}
        self._sums: dict[tuple[OperatorCosts, str], Floats] = {}
        self._summed: dict[OperatorCosts, Floats] = {}
        self._stages: dict[tuple[OperatorCosts, int, int, float], Stage] = {}

    @property
    def count(self) -> int:
        """Number of pieces."""
        return len(self.pieces) - 1

    def memory(self, stage: int) -> StageMemory:
        """Return the bytes of all pieces on the devices of a stage."""
        return self._memories[self.figures[stage]]

    @functools.cached_property
    def totals(self) -> list[Floats]:
        """For each stage, the seconds of a step of all pieces before each piece."""
        totals = {
            kind: np.concatenate(([0.0], np.cumsum(self._seconds(kind)))) for kind in self._kinds
        }
        return [totals[figures] for figures in self.figures]

    def reach(
        self,
        flying: Sequence[float],
        limits: Sequence[float],
        hosts: Sequence[float],
        most_pieces: int | None = None,
    ) -> list[Ints]:
        """Return, for each stage, the furthest end from each piece on.

        `flying`: micro-batches in flight on each stage. `limits`, `hosts`: bytes of its device and
        of its host. `most_pieces`: no stage longer than this is looked at.
        """
        ends: list[Ints] = [np.zeros(0, dtype=np.int64)] * len(self.figures)
        for kind, stages in self._stages_of:
            # Stages with as much in flight and as much room reach equally far.
            cases = [(flying[stage], limits[stage], hosts[stage]) for stage in stages]
            places = tuple(dict.fromkeys(cases))
            flown, most, room = (
                np.array(values, dtype=np.float64) for values in zip(*places, strict=True)
            )
            # All stages of a kind are found in one pass over the pieces.
            rows = self._memories[kind].furthest(flown, most, room, most_pieces)
            shared = dict(zip(places, rows, strict=True))
            for stage, case in zip(stages, cases, strict=True):
                ends[stage] = shared[case]
        return ends

    def costs(self, reach: Sequence[Ints], longest: int) -> list[Floats]:
        """Return, for each stage, the seconds of every interval of up to `longest` pieces.

        They are infinite beyond the stage's `reach`.
        """
        stops = np.arange(len(self.pieces))
        # Row s holds the intervals that end at s, the longest first.
        starts = np.maximum(stops[:, None] - longest + np.arange(longest), 0)
        costs: list[Floats] = [np.zeros(0)] * len(self.figures)
        for kind, stages in self._stages_of:
            seconds = interval_sums(self._seconds(kind), longest)
            # Stages that reach equally far share their table.
            by_reach: dict[bytes, Floats] = {}
            for stage in stages:
                key = reach[stage].tobytes()
                if key not in by_reach:
                    within = reach[stage][starts] >= stops[:, None]
                    by_reach[key] = seconds if within.all() else np.where(within, seconds, math.inf)
                costs[stage] = by_reach[key]
        return costs

    def stage(self, number: int, i: int, j: int, flying: float) -> Stage:
        """Return stage `number` with the pieces i to j - 1, and `flying` micro-batches in flight.

        It is remembered, because shifting one cut changes only the two stages beside it.
        """
        figures = self.figures[number]
        key = (figures, i, j, flying)
        if key not in self._stages:
            if figures not in self._summed:
                rows = [self._of_pieces(figures, name) for name in SUMMED]
                self._summed[figures] = np.array(rows)
            sums = dict(
                zip(SUMMED, self._summed[figures][:, i:j].sum(axis=1).tolist(), strict=True)
            )
            start = int(self.pieces[i])
            stop = int(self.pieces[j])
            sums["update"] += figures.uneven(start, stop)
            sums["forward"] += figures.visit
            sums["backward"] += figures.visit
            memory, working = self._memories[figures].of(flying, i, j)
            self._stages[key] = Stage(
                start=start, stop=stop, memory=memory, working=working, **sums
            )
        return self._stages[key]

    def _of_pieces(self, figures: OperatorCosts, name: str) -> Floats:
        """Return the sum of a figure over the operators of each piece."""
        key = (figures, name)
        if key not in self._sums:
            self._sums[key] = np.add.reduceat(getattr(figures, name), self.pieces[:-1])
        return self._sums[key]

    def _seconds(self, figures: OperatorCosts) -> Floats:
        """Return the seconds of a step of each piece."""
        passes = self._of_pieces(figures, "forward") + self._of_pieces(figures, "backward")
        return (
            self.micro_batches * passes
            + self._of_pieces(figures, "once")
            + self._of_pieces(figures, "update")
        )
