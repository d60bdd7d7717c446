"""The solutions of a candidate of a small model, from its optimum to that of least memory, priced as programs: one set for every limit.

A step is not steady in the memory limit of its tables: what the tables put next to each other may differ by per cents as a program. So
no limit is asked for. The solutions on the front of (bytes, seconds) of the tables are the candidate's own, whatever the memory is, and

    step(M) = min over the front of  step of the program, where that fits M

which more memory makes no longer, but for what is looked for between the last that does not fit and the first that does (`_filling`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.costmodel.step.estimate import timeline
from autopar.search import Infeasible, Solution
from autopar.search.frontier import frontier

from ..sharding.schedule import Schedule
from .folded_model import FoldedModel
from .pipeline_search import Group, cut_of
from .priced_program import DraftProgram, thriftier
from .request import Request
from .solving import QUICK_METHOD, solve_within
from .tables import Tables
from .tuning import TUNING
from .unfolding import unfold

WAITS, STRIDE = 1.3, 0.93
"""How much longer than without a limit a step may be for thriftier solutions to be looked at, and the bytes of the next of them."""
FILLINGS = 4
"""How many solutions are looked for between the last that does not fit and the first that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A solution as a program: its step (infinite: it does not fit), the bytes of the fullest device, and the step without a limit."""

    solution: Solution
    seconds: float
    memory: float
    free: float


Price = Callable[[Tables, Solution, bool], Priced]
"""Prices a solution of tables; the last says whether the step without a limit is wanted, or may be that within it."""
Whole = Callable[[Tables, Solution], tuple[Tables, Solution]]


class Front:
    """The solutions of tables in the order of falling memory, each priced at most once; `first`: that of most memory, if it is known."""

    def __init__(self, tables: Tables, price: Price, memory_limit: float, first: Solution | None = None, fillings: int = FILLINGS) -> None:
        self.tables, self.price, self.memory_limit, self.fillings = tables, price, memory_limit, fillings
        self.found: list[Solution] = [first] if first is not None else []
        self.left: Iterator[Solution] = itertools.islice(frontier(tables.graph), len(self.found), None)
        self.priced: dict[int, Priced] = {}
        self.needed = math.inf
        """The least bytes of a device that were seen."""

    def solutions(self) -> Iterator[Solution]:
        """All of them, found as they are asked for."""
        for number in itertools.count():
            if number == len(self.found):
                following = next(self.left, None)
                if following is None:
                    return
                self.found.append(following)
            yield self.found[number]

    def near(self, most: float = math.inf, ceiling: float = math.inf) -> Iterator[Priced]:
        """Those that fit, up to where the tables add up to `cut` times what they do for the first; more where it has to wait for memory.

        `most`: bytes of the tables above which surely none fits. `ceiling`: what they may add up to.
        """
        enough, step = math.inf, 1.0
        for number, solution in enumerate(self.solutions()):
            if solution.cost > min(enough, ceiling):
                break
            if solution.memory > most or self.tables.host_of(solution.choices) > self.tables.host_room:
                continue
            if number not in self.priced:
                self.priced[number] = self.price(self.tables, solution, math.isinf(enough))
            priced = self.priced[number]
            self.needed = min(self.needed, priced.memory)
            if priced.seconds < math.inf:
                if math.isinf(enough):
                    waits = min(priced.seconds / priced.free, WAITS)
                    # What has to wait for memory gets a better schedule with much less of it.
                    enough, step = TUNING.cut * solution.cost * waits, STRIDE if waits > TUNING.cut else 1.0
                most = step * solution.memory
                yield priced
            elif priced.memory > self.memory_limit:
                # Programs shrink about as their tables do: half the way to what would fit is passed over.
                most = solution.memory * math.sqrt(self.memory_limit / priced.memory)

    @property
    def tightened(self) -> bool:
        """Whether the memory is too little for the first one, or for its best schedule."""
        first = self.priced.get(0)
        return first is None or math.isinf(first.seconds) or first.seconds > (1 + TUNING.rounding) * first.free

    def best(self, most: float = math.inf, ceiling: float = math.inf) -> Priced:
        """The fastest of these, the first where the memory is no question; raises `Infeasible`, with the least bytes of a device seen."""
        best = None
        for priced in self.near(most, ceiling):
            best = min(best or self._filling(priced), priced, key=lambda one: one.seconds)
            if not self.tightened:
                break
        if best is None:
            raise Infeasible(max(self.needed, math.nextafter(self.memory_limit, math.inf)), self.memory_limit)
        return best

    def _filling(self, first: Priced) -> Priced:
        """The first that fits, or what is found between it and the last that does not."""
        over = min((one.solution.memory for one in self.priced.values() if math.isinf(one.seconds)), default=0.0)
        best, within = first, first
        for _ in range(self.fillings):
            if over * TUNING.brimful <= within.solution.memory or within.memory >= TUNING.brimful * self.memory_limit:
                break
            try:
                found = self.price(self.tables, solve_within(self.tables, QUICK_METHOD, math.sqrt(over * within.solution.memory)), False)
            except Infeasible:
                break
            if found.seconds < math.inf:
                within = found
                best = min(best, found, key=lambda one: one.seconds)
            if found.solution.memory <= within.solution.memory and found is not within:
                break
            over = over if found is within else found.solution.memory
        return best


def price_program(schedule: Schedule, memory_limit: float, whole: Whole | None = None) -> Price:
    """Prices solutions without stages as programs; `whole`: makes a solution one of the whole graph, if the tables are not."""

    def price(tables: Tables, solution: Solution, wanting: bool) -> Priced:
        draft = thriftier(DraftProgram.of(*(whole(tables, solution) if whole else (tables, solution)), schedule), memory_limit)
        if draft.memory.total > memory_limit:
            return Priced(solution=solution, seconds=math.inf, memory=draft.memory.total, free=math.inf)
        step = timeline(draft.plan, draft.tables.analysis, tables.prices, optimizer=tables.optimizer).step
        return Priced(solution=solution, seconds=step, memory=draft.memory.total, free=step)

    return price


def price_alone(folded: FoldedModel, micro_batches: int, schedule: Schedule, memory_limit: float) -> Price:
    """Prices solutions of the folded graph without stages, as programs of the whole graph."""
    analysis = folded.analysis(short=False, micro_batches=micro_batches)

    def whole(tables: Tables, solution: Solution) -> tuple[Tables, Solution]:
        unfolded, choices = unfold(tables, solution.choices, folded.folding, analysis)
        return unfolded, replace(solution, choices=choices)

    return price_program(schedule, memory_limit, whole)


def price_stages(folded: FoldedModel, group: Group, schedule: Schedule, request: Request, always: float) -> Price:
    """Prices solutions as pipelines, at their best cuts under the best schedule."""

    def price(tables: Tables, solution: Solution, wanting: bool) -> Priced:
        cut = cut_of(group, tables, solution, schedule, request, always=always, expand=folded.expand, wanting=wanting)
        seconds = cut.pipeline.step if cut.pipeline is not None else math.inf
        return Priced(solution=solution, seconds=seconds, memory=cut.memory, free=cut.free)

    return price
