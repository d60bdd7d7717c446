"""The front of a small model's candidate: its solutions by falling memory, priced as programs.

Solving within a memory limit is unsteady: two solutions that the tables rate alike may differ by
some per cent as programs, so that a little more memory could give a slower plan. The solutions on
the front of (bytes, seconds) of the tables do not depend on the limit. Of these, the fastest one
whose program fits is taken:

    step(M) = min over the front of  step of the program, where that fits M

More memory then never makes the step longer, with one exception: `_filling` looks for further
solutions between the last one that does not fit and the first one that does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from autopar.planning.model.effort import EFFORT
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.solve.within_limits import QUICK_METHOD, solve_within
from autopar.planning.stages.parts import Group, Terms
from autopar.planning.stages.staged_program import cut_of
from autopar.planning.stages.whole_model import expand
from autopar.planning.tables.tables import Tables
from autopar.search import Infeasible, Solution, frontier
from autopar.sharding.schedule import Schedule

from .priced_program import DraftProgram, thriftier
from .whole_graph import unfold

WAITS = 1.3
STRIDE = 0.93
"""Limits of the walk along a front where a step has to wait for memory.

`WAITS`: the most that such waiting extends the walk, as a multiple of the step without a limit.
`STRIDE`: the share of a solution's bytes that the next one looked at may take.
"""
FILLINGS = 4
"""The most solutions to look for between the last one that does not fit and the first that does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A solution with the figures of its program.

    `seconds`: its step, infinite if it does not fit. `memory`: bytes of the fullest device. `free`:
    its step without a memory limit.
    """

    solution: Solution
    seconds: float
    memory: float
    free: float


Price = Callable[[Tables, Solution, bool], Priced]
"""Prices a solution of tables.

The last argument says whether the step without a limit is wanted. If it is not, the step within the
limit may stand for it.
"""
Whole = Callable[[Tables, Solution], tuple[Tables, Solution]]


class Front:
    """The solutions of tables in the order of falling memory, each priced at most once.

    `first`: the solution of most memory, if it is known already.
    """

    def __init__(
        self,
        tables: Tables,
        price: Price,
        memory_limit: float,
        first: Solution | None = None,
        fillings: int = FILLINGS,
    ) -> None:
        self.tables = tables
        self.price = price
        self.memory_limit = memory_limit
        self.fillings = fillings
        self.taken: list[Solution] = [first] if first is not None else []
        # The front begins with the very solution that may be given as the first, so that one is
        # skipped.
        self.left: Iterator[Solution] = itertools.islice(
            frontier(tables.graph), len(self.taken), None
        )
        self.priced: dict[int, Priced] = {}
        self.needed = math.inf
        """The least bytes of the fullest device that any priced program needed."""

    def solutions(self) -> Iterator[Solution]:
        """Yield all solutions, each made only when it is asked for."""
        for number in itertools.count():
            if number == len(self.taken):
                following = next(self.left, None)
                if following is None:
                    return
                self.taken.append(following)
            yield self.taken[number]

    def near(self, most: float = math.inf, ceiling: float = math.inf) -> Iterator[Priced]:
        """Yield the programs that fit, the first one and those whose tables promise little more.

        The walk ends where the tables add up to more than `EFFORT.behind` times their sum for the
        first program that fits. If that program has to wait for memory, the walk goes further.

        `most`: bytes of the tables above which no program can fit. `ceiling`: the most seconds that
        the tables may add up to.
        """
        enough = math.inf
        step = 1.0
        for number, solution in enumerate(self.solutions()):
            # Along the front memory falls and seconds rise: all that follow are dearer still.
            if solution.cost > min(enough, ceiling):
                break
            if (
                solution.memory > most
                or self.tables.host_of(solution.choices) > self.tables.host_room
            ):
                continue
            # Every call walks the front from its start, and pricing is most of the work.
            if number not in self.priced:
                self.priced[number] = self.price(self.tables, solution, math.isinf(enough))
            priced = self.priced[number]
            self.needed = min(self.needed, priced.memory)
            if priced.seconds < math.inf:
                if math.isinf(enough):
                    waits = min(priced.seconds / priced.free, WAITS)
                    # What has to wait for memory gets a better schedule with much less of it.
                    enough = EFFORT.behind * solution.cost * waits
                    step = STRIDE if waits > EFFORT.behind else 1.0
                most = step * solution.memory
                yield priced
            elif priced.memory > self.memory_limit:
                # Programs shrink about as their tables do: half the way to what would fit is passed
                # over.
                most = solution.memory * math.sqrt(self.memory_limit / priced.memory)

    @property
    def tightened(self) -> bool:
        """Whether the memory is too small for the first solution, or for its best schedule."""
        first = self.priced.get(0)
        return (
            first is None
            or math.isinf(first.seconds)
            or first.seconds > (1 + EFFORT.rounding) * first.free
        )

    def best(self, most: float = math.inf, ceiling: float = math.inf, few: int = 1) -> Priced:
        """Return the fastest program among those of `near`.

        Where memory is no question, only the first `few` of them are compared. If none fits,
        `Infeasible` is raised, with the least bytes of a device that were seen.
        """
        best = None
        for number, priced in enumerate(self.near(most, ceiling), start=1):
            # Only the first one that fits has a gap before it, in which a faster one may lie.
            best = min(best or self._filling(priced), priced, key=lambda one: one.seconds)
            if number >= few and not self.tightened:
                break
        # A program may be refused although the bytes seen are within the limit. The error has to
        # name more than the limit all the same.
        if best is None:
            raise Infeasible(
                max(self.needed, math.nextafter(self.memory_limit, math.inf)), self.memory_limit
            )
        return best

    def _filling(self, first: Priced) -> Priced:
        """Return the first program that fits, or a faster one of slightly more memory.

        That one is looked for between the last solution that does not fit and the first that does.
        """
        over = min(
            (one.solution.memory for one in self.priced.values() if math.isinf(one.seconds)),
            default=0.0,
        )
        best = first
        within = first
        for _ in range(self.fillings):
            if (
                over * EFFORT.full <= within.solution.memory
                or within.memory >= EFFORT.full * self.memory_limit
            ):
                break
            try:
                tried = self.price(
                    self.tables,
                    solve_within(
                        self.tables, QUICK_METHOD, math.sqrt(over * within.solution.memory)
                    ),
                    False,
                )
            except Infeasible:
                break
            if tried.seconds < math.inf:
                within = tried
                best = min(best, tried, key=lambda one: one.seconds)
            # It does not fit, with no more bytes in the tables than one that does: here the tables
            # no longer tell which program needs less.
            if tried.solution.memory <= within.solution.memory and tried is not within:
                break
            over = over if tried is within else tried.solution.memory
        return best


def remembered(price: Price) -> Price:
    """Return a pricing that prices equal choices once: tables of other hidden shares have them."""
    known: dict[tuple[tuple[int, ...], bool], Priced] = {}

    def priced(tables: Tables, solution: Solution, wanting: bool) -> Priced:
        key = (solution.choices, wanting)
        if key not in known:
            known[key] = price(tables, solution, wanting)
            # The step without a limit of memory harms nobody who did not ask for it.
            known.setdefault((solution.choices, False), known[key])
        return replace(known[key], solution=solution)

    return priced


def price_program(schedule: Schedule, memory_limit: float, whole: Whole | None = None) -> Price:
    """Return the pricing of solutions without stages, as programs.

    `whole`: turns a solution into one of the whole graph. None: the tables are of the whole graph
    already.
    """

    def price(tables: Tables, solution: Solution, wanting: bool) -> Priced:
        draft = thriftier(
            DraftProgram.of(*(whole(tables, solution) if whole else (tables, solution)), schedule),
            memory_limit,
        )
        if draft.memory.total > memory_limit:
            return Priced(
                solution=solution, seconds=math.inf, memory=draft.memory.total, free=math.inf
            )
        step = draft.timeline.step
        # Without stages memory chooses no schedule, so there is no other step to tell.
        return Priced(solution=solution, seconds=step, memory=draft.memory.total, free=step)

    return price


def price_alone(
    folded: FoldedModel, micro_batches: int, schedule: Schedule, memory_limit: float
) -> Price:
    """Return the pricing of folded solutions without stages, as programs of the whole graph."""
    analysis = folded.analysis(short=False, micro_batches=micro_batches)

    def whole(tables: Tables, solution: Solution) -> tuple[Tables, Solution]:
        unfolded, choices = unfold(tables, solution.choices, folded.folding, analysis)
        return unfolded, replace(solution, choices=choices)

    return price_program(schedule, memory_limit, whole)


def price_stages(
    folded: FoldedModel, group: Group, schedule: Schedule, request: Request, always: float
) -> Price:
    """Return the pricing of solutions as pipelines, at their best cuts under the best schedule."""

    whole = functools.partial(expand, folded)
    terms = Terms(request=request, schedule=schedule, always=always, expand=whole)

    def price(tables: Tables, solution: Solution, wanting: bool) -> Priced:
        cut = cut_of(group, tables, solution, terms, wanting=wanting)
        seconds = cut.pipeline.step if cut.pipeline is not None else math.inf
        return Priced(solution=solution, seconds=seconds, memory=cut.memory, free=cut.free)

    return price
