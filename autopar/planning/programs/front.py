"""The front of a small model's candidate: its solutions by falling memory, priced as programs.

Solving within a memory limit is unsteady: two solutions that the tables rate alike may differ by
some per cent as programs, so that a little more memory could give a slower plan. The solutions on
the front of (bytes, seconds) of the tables do not depend on the limit. Of these, the fastest one
whose program fits is taken:

    step(M) = min over the front of  step of the program, where that fits M

The limit only filters, so that more memory never makes the step longer as far as two things hold:
what is left out takes longer than what is taken, which figures that know no limit tell, and cuts
within more memory are no slower than those within less.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.stages.parts import Group, Terms
from autopar.planning.stages.staged_program import CutSolution
from autopar.planning.tables.tables import Tables
from autopar.search import Infeasible, Solution, frontier
from autopar.sharding.schedule import Schedule

from .priced_program import DraftProgram, thriftier
from .whole_graph import unfold

FAR = 1.25
"""How much more of a program's seconds than of those before it its tables may promise.

Of 953 fronts of four-layer models that were walked to their ends, 95 % had their fastest program
within it, 89 % within 1.1, and all within 1.44. A larger one takes a quarter longer.
"""


@dataclass(frozen=True, slots=True)
class Step:
    """The step of a solution's program in `seconds`, and the bytes of its fullest device."""

    seconds: float
    memory: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A solution with its step within the memory, as of `Step`.

    `seconds`: infinite if the program does not fit. Of what takes longer than is wanted, a lower
    bound may stand for it.
    """

    solution: Solution
    seconds: float
    memory: float


class Pricing(Protocol):
    """Prices solutions of tables as programs.

    `below`: the seconds that are wanted; of what takes longer, it may give a lower bound that is
    not below them.
    """

    def free(self, tables: Tables, solution: Solution, below: float) -> Step:
        """The program as it is without a limit of memory."""

    def within(self, tables: Tables, solution: Solution, below: float) -> Priced:
        """The program within the memory."""


Whole = Callable[[Tables, Solution], tuple[Tables, Solution]]


class Front:
    """The solutions of tables in the order of falling memory.

    `tightened`: whether the memory is too small for the first one's program without a limit.
    """

    def __init__(self, tables: Tables, price: Pricing, memory_limit: float) -> None:
        self.tables = tables
        self.price = price
        self.memory_limit = memory_limit
        self.taken: list[Solution] = []
        self.left: Iterator[Solution] = frontier(tables.graph)
        self.tightened = False

    def solutions(self) -> Iterator[Solution]:
        """Yield all solutions, each made only when it is asked for."""
        for number in itertools.count():
            if number == len(self.taken):
                following = next(self.left, None)
                if following is None:
                    return
                self.taken.append(following)
            yield self.taken[number]

    def best(
        self, *, below: float = math.inf, rate: float = 1.0, most: float = math.inf
    ) -> Priced | None:
        """Return the fastest program that fits; None if those that may be are not `below`.

        Raises `Infeasible` if none fits, with the least bytes of a device that were seen. `rate`:
        the seconds of a step that a program hardly undercuts, for each second that its tables add
        up to. `most`: the bytes of tables that are looked at.
        """
        first = next(self.solutions())
        free = self.price.free(self.tables, first, below)
        self.tightened = free.memory > self.memory_limit
        best: Priced | None = None
        wanted = below
        needed = math.inf
        fitting = most
        passed_over: list[Solution] = []
        # Where tables promise too little for the programs so far, they do for those behind.
        least = free.seconds / first.cost
        for solution in self.solutions():
            # Along the front memory falls and seconds rise: all that follow are dearer still.
            sure = rate if least >= rate else 0.0
            if max(sure, least / FAR) * solution.cost >= wanted:
                break
            hosted = self.tables.host_of(solution.choices) <= self.tables.host_room
            if solution.memory > most or not hosted:
                continue
            if solution.memory > fitting:
                passed_over.append(solution)
                continue
            # From the first that fits, those that were passed over are come back to, as far as they
            # fit, too.
            for one in (solution, *reversed(passed_over)):
                priced = self.price.within(self.tables, one, wanted)
                if math.isinf(priced.seconds):
                    needed = min(needed, priced.memory)
                    # Programs shrink about as their tables do: half the way to what would fit is
                    # passed over.
                    fitting = one.memory * math.sqrt(self.memory_limit / priced.memory)
                    break
                least = min(least, priced.seconds / one.cost)
                if priced.seconds < wanted:
                    best = priced
                    wanted = priced.seconds
            passed_over = []
        if best is None and (needed < math.inf or math.isinf(below)):
            # A program may be refused although the bytes seen are within the limit. The error has
            # to name more than the limit all the same.
            raise Infeasible(
                max(needed, math.nextafter(self.memory_limit, math.inf)), self.memory_limit
            )
        return best


class AlonePricing:
    """Prices solutions without stages, as programs.

    `whole`: turns a solution into one of the whole graph. None: the tables are of the whole graph
    already.
    """

    def __init__(self, schedule: Schedule, memory_limit: float, whole: Whole | None = None) -> None:
        self.schedule = schedule
        self.memory_limit = memory_limit
        self.whole = whole
        self._steps: dict[tuple[int, ...], Step] = {}
        self._memories: dict[tuple[int, ...], float] = {}
        self._last: tuple[Solution, DraftProgram] | None = None

    def free(self, tables: Tables, solution: Solution, below: float) -> Step:
        """The program as it is without a limit of memory."""
        key = solution.choices
        if key not in self._steps:
            draft = self._draft(tables, solution)
            self._steps[key] = Step(seconds=draft.timeline.step, memory=draft.memory.total)
        return self._steps[key]

    def within(self, tables: Tables, solution: Solution, below: float) -> Priced:
        """The program within the memory, with smaller units of parameters where it needs them."""
        # What does not fit needs no timeline, which takes as long as its memory.
        key = solution.choices
        # Every share that is taken as hidden comes here with the same choices.
        if key not in self._memories:
            self._memories[key] = self._draft(tables, solution).memory.total
        memory = self._memories[key]
        if memory <= self.memory_limit:
            seconds = self.free(tables, solution, below).seconds
            return Priced(solution=solution, seconds=seconds, memory=memory)
        draft = thriftier(self._draft(tables, solution), self.memory_limit)
        memory = draft.memory.total
        seconds = draft.timeline.step if memory <= self.memory_limit else math.inf
        return Priced(solution=solution, seconds=seconds, memory=memory)

    def _draft(self, tables: Tables, solution: Solution) -> DraftProgram:
        if self._last is None or self._last[0].choices != solution.choices:
            whole = self.whole(tables, solution) if self.whole else (tables, solution)
            self._last = solution, DraftProgram.of(*whole, self.schedule)
        return self._last[1]


def price_alone(
    folded: FoldedModel, micro_batches: int, schedule: Schedule, memory_limit: float
) -> Pricing:
    """Return the pricing of folded solutions without stages, as programs of the whole graph."""
    analysis = folded.analysis(short=False, micro_batches=micro_batches)

    def whole(tables: Tables, solution: Solution) -> tuple[Tables, Solution]:
        unfolded, choices = unfold(tables, solution.choices, folded.folding, analysis)
        return unfolded, replace(solution, choices=choices)

    return AlonePricing(schedule, memory_limit, whole)


class StagePricing:
    """Prices solutions as pipelines, at their best cuts under the best schedule."""

    def __init__(self, group: Group, terms: Terms) -> None:
        self.group = group
        self.terms = terms
        self._steps: dict[tuple[int, ...], Step] = {}
        self._needed: dict[tuple[int, ...], float] = {}
        self.memory_limit = terms.request.memory_limit_on(group.cluster)
        self._last: tuple[Solution, CutSolution] | None = None

    def free(self, tables: Tables, solution: Solution, below: float) -> Step:
        """The best cuts without a limit of memory."""
        key = solution.choices
        if key not in self._steps:
            # That depends on what is wanted, so it is not remembered.
            if (ideal := self._cut(tables, solution).ideal()) >= below:
                return Step(seconds=ideal, memory=0.0)
            self._steps[key] = Step(*self._cut(tables, solution).free())
        return self._steps[key]

    def within(self, tables: Tables, solution: Solution, below: float) -> Priced:
        """The best cuts within the memory, which are those without a limit where these fit."""
        # That nothing fits is known before any cut is made.
        key = solution.choices
        if key not in self._needed and not self._cut(tables, solution).fits:
            self._needed[key] = self._cut(tables, solution).needed()
        if (least := self._needed.get(key, 0.0)) > self.memory_limit:
            return Priced(solution=solution, seconds=math.inf, memory=least)
        free = self.free(tables, solution, below)
        # Cuts without a limit ask no host for room either.
        hosted = tables.host_of(solution.choices) > 0
        if free.seconds >= below or (free.memory <= self.memory_limit and not hosted):
            return Priced(solution=solution, seconds=free.seconds, memory=free.memory)
        seconds, memory = self._cut(tables, solution).within()
        return Priced(solution=solution, seconds=seconds, memory=memory)

    def _cut(self, tables: Tables, solution: Solution) -> CutSolution:
        if self._last is None or self._last[0].choices != solution.choices:
            self._last = solution, CutSolution(self.group, tables, solution, self.terms)
        return self._last[1]
