"""Equal layers made alike: a plan treats them in several ways only where that pays, and says what it pays.

Of a run of equal layers each way w that is found among them, and that of the folded graph's solution, is given to all of them:

    alike = min over w of step(all layers as w)  within the memory          a mixture of ways pays alike - step

Where that is nothing, the layers are alike. The first layer keeps a way of its own where no other layer has it, as it may be handed its
values in another layout; fan-outs are chosen anew, all else stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.search import Solution

from ..ir import Graph, Role
from ..sharding.schedule import zero_stage
from .folded_model import FoldedModel
from .folding import Run
from .pipeline_search import Part, StagedProgram, recut
from .priced_program import DraftProgram, PricedProgram
from .request import Request
from .solved_candidate import Solved
from .tables import Tables
from .tuning import TUNING
from .unfolding import Row, on_whole, row_of, settled

Planned = PricedProgram | StagedProgram
Way = tuple[Row, ...]
"""Of the operators and parameters of a layer, in the order of the model: the row of each, and whether it leaves state on the host."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Equal layers, from operator `first` on, that a plan treats in several ways.

    `alike`: seconds of the step where all are treated in one of these ways (None: none fits). `needed`: bytes of a device under the one
    of them that adds up to least seconds, where that does not fit (0: it does).
    """

    first: str
    layers: int
    alike: float | None
    needed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tried:
    """A way that all layers of a run were given: the plan (None: it does not fit), and the bytes that a device needs."""

    plan: Planned | None
    needed: float


class Alike:
    """Gives all layers of a run one way, on the tables of a plan."""

    def __init__(self, folded: FoldedModel, request: Request, always: float) -> None:
        self.folded, self.request, self.always = folded, request, always
        self.known: dict[tuple[int, Run], list[list[int]]] = {}
        self.made: dict[int, tuple[Planned, Planned, tuple[Mixture, ...]]] = {}

    def best(self, plan: Planned, solved: Sequence[Solved]) -> tuple[Planned, tuple[Mixture, ...]]:
        """The plan with equal layers alike where that is as fast, and the mixtures that are left; `solved`: what the walk has solved."""
        if id(plan) not in self.made:
            best, mixtures = plan, list[Mixture]()
            for run in self.folded.runs:
                if self.mixed(best, run):
                    best, left = self._of_run(best, run, solved)
                    mixtures += left
            self.made[id(plan)] = self.made[id(best)] = plan, best, tuple(mixtures)
        return self.made[id(plan)][1:]

    def _of_run(self, best: Planned, run: Run, solved: Sequence[Solved]) -> tuple[Planned, list[Mixture]]:
        """The plan with the layers of one run alike, or as it is with what their mixture pays."""
        tried = [*self.ways(best, run), *(self.from_folded(best, solved) if isinstance(best, PricedProgram) else ())]
        fastest = min((one.plan for one in tried if one.plan is not None), key=lambda plan: plan.seconds, default=None)
        if fastest is not None and fastest.seconds <= (1 + TUNING.rounding) * best.seconds:
            return fastest, []
        if not tried:
            return best, []  # what is pinned keeps them apart
        needed = tried[0].needed if tried[0].plan is None else 0.0
        first, alike = self.folded.graph.operators[run.start].name, fastest.seconds if fastest is not None else None
        return best, [Mixture(first=first, layers=run.layers, alike=alike, needed=needed)]

    def layers(self, tables: Tables, run: Run) -> list[list[int]]:
        """The variables of the operators and parameters of each layer; none where layers differ in what is chosen of them."""
        key = (id(tables), run)
        if key not in self.known:
            at = {(v.what, v.name): number for number, v in enumerate(tables.variables)}
            named = [list(_names(self.folded.graph, layer)) for layer in run.segments()]
            shared = Counter(name for names in named for name in set(names))
            found = [[at[name] for name in names if name in at and shared[name] == 1] for names in named]
            self.known[key] = found if len(set(map(len, found))) == 1 else []
        return self.known[key]

    def mixed(self, best: Planned, run: Run) -> bool:
        """Whether the layers behind the first are treated in several ways."""
        return any(len(set(self._ways(part, self._own(best, part, run))[1:])) > 1 for part in _parts(best))

    def ways(self, best: Planned, run: Run) -> Iterator[_Tried]:
        """The plan with all layers in each of the ways found among them, first in what its tables add up to least."""
        found = [self._alike(part, self._own(best, part, run)) for part in _parts(best)]
        for number in range(min(max(map(len, found)), TUNING.ways) if all(found) else 0):
            yield self._made(best, [ways[min(number, len(ways) - 1)] for ways in found])

    def from_folded(self, best: PricedProgram, solved: Sequence[Solved]) -> Iterator[_Tried]:
        """The plan that the folded graph's solution of the same candidate is, in which all layers are alike."""
        tables = best.tables
        shorter = len(self.folded.folding.graph.operators) < len(self.folded.graph.operators)
        for one in solved if shorter else ():
            solution = on_whole(one.tables, one.solution, self.folded.folding, tables) if self._is_of(best, one) else None
            if solution is not None:
                yield self._made(best, [solution])

    def _is_of(self, best: PricedProgram, solved: Solved) -> bool:
        """Whether a solution is of the plan's candidate, in its mode."""
        candidate, mode, schedule, prices = solved.candidate, solved.mode, best.schedule, best.tables.prices
        place = (candidate.stages, candidate.cluster, candidate.mesh, candidate.micro_batches)
        if place != (1, prices.cluster, prices.mesh, schedule.micro_batches):
            return False
        zero = zero_stage(schedule.gathered, schedule.accumulated)
        return max(mode.zero, 1) == zero and self.folded.segments(mode.recompute, short=False) == schedule.recompute

    def _own(self, best: Planned, part: PricedProgram | Part, run: Run) -> list[list[int]]:
        """The layers of a run that a part of the plan runs, where the others have devices of other kinds."""
        layers = self.layers(part.tables, run)
        if isinstance(best, PricedProgram) or len(best.parts) == 1:
            return layers
        part_of = best.part_of()
        names = [self.folded.graph.operators[layer.start].name for layer in run.segments()]
        return [layer for layer, name in zip(layers, names, strict=True) if part_of[name] is part] if layers else []

    def _ways(self, part: PricedProgram | Part, layers: Sequence[Sequence[int]]) -> list[Way]:
        return [_way_of(part.tables, layer, part.solution.choices) for layer in layers]

    def _alike(self, part: PricedProgram | Part, layers: Sequence[Sequence[int]]) -> list[Solution]:
        """Solutions in which all these layers have one of the ways found among them, the cheapest first; the part's own where they are."""
        ways = self._ways(part, layers)
        if len(set(ways[1:])) < 2:
            return [part.solution]
        first = 0 if ways[0] in ways[1:] else 1
        variables = part.tables.variables
        found = []
        for way in dict.fromkeys(ways[1:]):
            pairs = [pair for layer in layers[first:] for pair in zip(layer, way, strict=True)]
            wanted = {(variables[number].what, variables[number].name): row for number, row in pairs}
            if (solution := _solution(part.tables, part.solution, wanted)) is not None:
                found.append(solution)
        return sorted(found, key=lambda solution: solution.cost)

    def _made(self, best: Planned, solutions: Sequence[Solution]) -> _Tried:
        """The plan of other solutions of the tables of each part."""
        if isinstance(best, StagedProgram):
            plan, needed = recut(best, solutions, self.request, always=self.always)
            return _Tried(plan=plan, needed=needed)
        draft = DraftProgram.of(best.tables, solutions[0], best.schedule)
        fits = draft.memory.total <= self.request.memory_limit_on(best.tables.prices.cluster)
        hosted = best.tables.host_of(solutions[0].choices) <= best.tables.host_room
        return _Tried(plan=draft.priced(tightened=best.tightened) if fits and hosted else None, needed=draft.memory.total)


def _parts(best: Planned) -> Sequence[PricedProgram | Part]:
    return best.parts if isinstance(best, StagedProgram) else (best,)


def _names(graph: Graph, layer: range) -> Iterator[tuple[str, str]]:
    """The operators and parameters of a layer as tables name their variables, in the order of the model."""
    for index in layer:
        op = graph.operators[index]
        yield "operator", op.name
        yield from (("parameter", name) for name in op.inputs if graph.tensors[name].role is Role.PARAMETER)


def _way_of(tables: Tables, numbers: Sequence[int], choices: Sequence[int]) -> Way:
    """What is chosen of these variables."""
    return tuple(row_of(tables.variables[number], choices[number]) for number in numbers)


def _solution(tables: Tables, known: Solution, wanted: Mapping[tuple[str, str], Row]) -> Solution | None:
    """A known solution with other operators and parameters, its fan-outs and outputs chosen anew; None where tables do not offer it."""
    own = {(v.what, v.name): row_of(v, choice) for v, choice in zip(tables.variables, known.choices, strict=True)}
    return settled(tables, {**own, **wanted}, known.lower_bound)
