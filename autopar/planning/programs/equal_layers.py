"""Equal layers made alike: a plan treats them in several ways only where that pays.

A *way* is the choices of a layer's operators and parameters. In a run of equal layers, each way
that is found among them, and that of the folded graph's solution, is given to all of them:

    alike = min over the ways w of  step(all layers as w)        within the memory

If the step gets no longer, the layers are alike. Otherwise their mixture pays alike - step, and the
plan says so. The first layer may keep a way that no other layer has, as it may be handed its values
in another layout. Fan-outs are chosen anew; all else stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.ir import Graph, Role
from autopar.planning.model import FoldedModel, Request
from autopar.planning.model.effort import EFFORT
from autopar.planning.model.folding import Run
from autopar.planning.solve.solved_candidate import Solved
from autopar.planning.stages import StagedProgram
from autopar.planning.stages.parts import Part
from autopar.planning.stages.staged_program import recut
from autopar.planning.tables import Tables
from autopar.search import Solution
from autopar.sharding.schedule import zero_stage

from .priced_program import DraftProgram, PricedProgram
from .whole_graph import Row, on_whole, row_of, settled

Planned = PricedProgram | StagedProgram
Way = tuple[Row, ...]
"""The choices of a layer's operators and parameters, in the order of the model.

Each is a row, with whether it leaves state on the host.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """Equal layers, from operator `first` on, that a plan treats in several ways.

    `alike`: seconds of the step where all are treated in one of these ways (None: none fits).
    `needed`: bytes of a device under the way whose tables add up to the fewest seconds, if that
    does not fit (0: it does).
    """

    first: str
    layers: int
    alike: float | None
    needed: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """A plan with one way for all layers of a run (None: it does not fit), and its bytes."""

    plan: Planned | None
    needed: float


class Alike:
    """Gives all layers of a run one way, on the tables of a plan.

    `always`: bytes of each device that inputs and constants take.
    """

    def __init__(self, folded: FoldedModel, request: Request, always: float) -> None:
        self.folded = folded
        self.request = request
        self.always = always
        self._layers: dict[tuple[Tables, Run], list[list[int]]] = {}
        self._best: dict[Planned, tuple[Planned, tuple[Mixture, ...]]] = {}

    def best(self, plan: Planned, solved: Sequence[Solved]) -> tuple[Planned, tuple[Mixture, ...]]:
        """Return the plan with equal layers alike where that is as fast, and other mixtures.

        `solved`: the candidates that the search has solved.
        """
        if plan not in self._best:
            best = plan
            mixtures = list[Mixture]()
            for run in self.folded.runs:
                if self.mixed(best, run):
                    best, remaining = self._of_run(best, run, solved)
                    mixtures += remaining
            # The result is settled as well: asked for by itself, it must not be searched again.
            self._best[plan] = self._best[best] = best, tuple(mixtures)
        return self._best[plan]

    def layers(self, tables: Tables, run: Run) -> list[list[int]]:
        """Return the variables of the operators and parameters of each layer.

        Tensors that layers share are left out. The list is empty if the layers still differ in what
        is chosen of them.
        """
        key = (tables, run)
        if key not in self._layers:
            numbers = {(v.what, v.name): number for number, v in enumerate(tables.variables)}
            named = [list(_names(self.folded.graph, layer)) for layer in run.segments()]
            uses = Counter(name for names in named for name in set(names))
            layers = [
                [numbers[name] for name in names if name in numbers and uses[name] == 1]
                for names in named
            ]
            self._layers[key] = layers if len(set(map(len, layers))) == 1 else []
        return self._layers[key]

    def mixed(self, best: Planned, run: Run) -> bool:
        """Whether the layers behind the first are treated in several ways."""
        return any(
            len(set(_ways(part, self._own_layers(best, part, run))[1:])) > 1
            for part in _parts(best)
        )

    def ways(self, best: Planned, run: Run) -> Iterator[_Trial]:
        """Yield the plan with all layers in each of the ways found among them.

        They come in ascending order of what the tables add up to.
        """
        solutions = [
            _alike_solutions(part, self._own_layers(best, part, run)) for part in _parts(best)
        ]
        if not all(solutions):
            return
        for number in range(min(max(map(len, solutions)), EFFORT.ways)):
            # A part of fewer ways repeats its last one.
            yield self._trial(best, [own[min(number, len(own) - 1)] for own in solutions])

    def from_folded(self, best: PricedProgram, solved: Sequence[Solved]) -> Iterator[_Trial]:
        """Yield the plans of folded solutions of the same candidate, whose layers are alike."""
        tables = best.tables
        # Nothing was folded, so the folded solutions are solutions of the whole graph already.
        if len(self.folded.folding.graph.operators) == len(self.folded.graph.operators):
            return
        for candidate in solved:
            if self._is_of(best, candidate):
                solution = on_whole(
                    candidate.tables, candidate.solution, self.folded.folding, tables
                )
                if solution is not None:
                    yield self._trial(best, [solution])

    def _of_run(
        self, best: Planned, run: Run, solved: Sequence[Solved]
    ) -> tuple[Planned, list[Mixture]]:
        """Return the plan with the layers of one run alike, or as it is with its mixture."""
        trials = list(self.ways(best, run))
        if isinstance(best, PricedProgram):
            trials += self.from_folded(best, solved)
        if not trials:
            # Pins keep the layers apart.
            return best, []
        fitting = [trial.plan for trial in trials if trial.plan is not None]
        fastest = min(fitting, key=lambda plan: plan.seconds, default=None)
        if fastest is not None and fastest.seconds <= (1 + EFFORT.rounding) * best.seconds:
            return fastest, []
        # Trials ascend by what their tables add up to, so the first would be the fastest if memory
        # allowed it. Its bytes tell the user what alike layers would take.
        mixture = Mixture(
            first=self.folded.graph.operators[run.start].name,
            layers=run.layers,
            alike=fastest.seconds if fastest is not None else None,
            needed=trials[0].needed if trials[0].plan is None else 0.0,
        )
        return best, [mixture]

    def _is_of(self, best: PricedProgram, solved: Solved) -> bool:
        """Whether a solution is of the plan's candidate, in its mode."""
        candidate = solved.candidate
        mode = solved.mode
        schedule = best.schedule
        prices = best.tables.prices
        place = (candidate.stages, candidate.cluster, candidate.mesh, candidate.micro_batches)
        if place != (1, prices.cluster, prices.mesh, schedule.micro_batches):
            return False
        zero = zero_stage(schedule.gathered, schedule.accumulated)
        return (
            # A schedule does not tell ZeRO 0 from ZeRO 1.
            max(mode.zero, 1) == zero
            and self.folded.segments(mode.recompute, short=False) == schedule.recompute
        )

    def _own_layers(self, best: Planned, part: PricedProgram | Part, run: Run) -> list[list[int]]:
        """Return the layers of a run that a part of the plan runs.

        The layers of other parts are on devices of other kinds.
        """
        layers = self.layers(part.tables, run)
        if not layers or isinstance(best, PricedProgram) or len(best.parts) == 1:
            return layers
        part_of = best.part_of()
        names = [self.folded.graph.operators[layer.start].name for layer in run.segments()]
        return [layer for layer, name in zip(layers, names, strict=True) if part_of[name] is part]

    def _trial(self, best: Planned, solutions: Sequence[Solution]) -> _Trial:
        """Return the plan of other solutions of the tables of each part."""
        if isinstance(best, StagedProgram):
            plan, needed = recut(best, solutions, self.request, always=self.always)
            return _Trial(plan=plan, needed=needed)
        draft = DraftProgram.of(best.tables, solutions[0], best.schedule)
        fits = draft.memory.total <= self.request.memory_limit_on(best.tables.prices.cluster)
        hosted = best.tables.host_of(solutions[0].choices) <= best.tables.host_room
        return _Trial(
            plan=draft.priced(tightened=best.tightened) if fits and hosted else None,
            needed=draft.memory.total,
        )


def _parts(best: Planned) -> Sequence[PricedProgram | Part]:
    return best.parts if isinstance(best, StagedProgram) else (best,)


def _names(graph: Graph, layer: range) -> Iterator[tuple[str, str]]:
    """Yield the operators and parameters of a layer, as tables name their variables."""
    for index in layer:
        op = graph.operators[index]
        yield "operator", op.name
        for name in op.inputs:
            if graph.tensors[name].role is Role.PARAMETER:
                yield "parameter", name


def _ways(part: PricedProgram | Part, layers: Sequence[Sequence[int]]) -> list[Way]:
    """Return the way of each layer."""
    variables = part.tables.variables
    choices = part.solution.choices
    return [
        tuple(row_of(variables[number], choices[number]) for number in layer) for layer in layers
    ]


def _alike_solutions(part: PricedProgram | Part, layers: Sequence[Sequence[int]]) -> list[Solution]:
    """Return solutions in which all these layers have one of their ways, the cheapest first.

    If they are alike already, it is the part's own solution.
    """
    ways = _ways(part, layers)
    if len(set(ways[1:])) < 2:
        return [part.solution]
    # A first layer with a way of its own keeps it.
    start = 0 if ways[0] in ways[1:] else 1
    variables = part.tables.variables
    solutions = []
    for way in dict.fromkeys(ways[1:]):
        wanted = {}
        for layer in layers[start:]:
            for number, row in zip(layer, way, strict=True):
                wanted[variables[number].what, variables[number].name] = row
        solution = _changed(part.tables, part.solution, wanted)
        if solution is not None:
            solutions.append(solution)
    return sorted(solutions, key=lambda solution: solution.cost)


def _changed(
    tables: Tables, solution: Solution, wanted: Mapping[tuple[str, str], Row]
) -> Solution | None:
    """Return a solution with other operators and parameters, or None if tables lack these.

    Its fan-outs and outputs are chosen anew.
    """
    own = {
        (variable.what, variable.name): row_of(variable, choice)
        for variable, choice in zip(tables.variables, solution.choices, strict=True)
    }
    return settled(tables, {**own, **wanted}, solution.lower_bound)
