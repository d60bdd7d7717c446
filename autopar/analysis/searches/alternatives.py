"""The reasons for an operator's strategy: each other strategy is forced and solved again.

    price(strategy) = min { cost(x) : x_operator = strategy, memory(x) <= limit } - min { cost(x) :
    memory(x) <= limit }

Both minima are of the same cost graph: the tables are built once, and a strategy is forced by
conditioning the graph on it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.analysis.program.strategy_words import option_words
from autopar.costmodel import Cluster
from autopar.costmodel.memory.states import certain_bytes
from autopar.ir import Operator
from autopar.plan import Plan
from autopar.planning.model.progress import Progress
from autopar.planning.model.request import default_limit
from autopar.planning.programs.priced_program import evaluate
from autopar.planning.tables.tables import Variable
from autopar.schemes import stages_of
from autopar.schemes.meanings import read_meanings
from autopar.search import Infeasible, NoAssignment, Solution, condition, solve
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Layout, format_layout

from .plan_tables import tables_of_plan

ALL = 64
"""The most strategies of an operator that are all forced; of more, those that differ on one axis
from the plan's.
"""
TOLD = 4
"""The most different redistributions to list."""
NEGLIGIBLE = 1e-6
"""The largest difference that counts as rounding, as a share of the step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A redistribution with another cost than in the best plan.

    It has its tensor, and the layouts and seconds of both plans.
    """

    tensor: str
    best: str
    forced: str
    best_seconds: float
    forced_seconds: float

    @property
    def seconds(self) -> float:
        """The added seconds."""
        return self.forced_seconds - self.best_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan in which an operator has a strategy, or a parameter a layout.

    Options and meanings are by axis.

    `step`: predicted seconds (None: `why` is the reason). `objective`: seconds as the search adds
    them up. `change`: the difference to the best plan. `own` is its part in the operator itself,
    `others` in other operators and stored parameters, and the rest is in redistributions. `moves`:
    the redistributions that differ most.
    """

    strategy: Mapping[str, str]
    words: Mapping[str, str]
    planned: bool = False
    step: float | None = None
    objective: float | None = None
    change: float | None = None
    own: float = 0.0
    others: float = 0.0
    moves: tuple[Difference, ...] = ()
    why: str = ""


class Why:
    """The tables of a plan and their best solution, which is compared with forced strategies.

    `play`: whether to predict each forced plan's step from its program; this takes longer than
    adding up the tables.
    """

    def __init__(
        self,
        plan: Plan,
        analysis: Analysis,
        cluster: Cluster,
        *,
        memory: float | None = None,
        play: bool = True,
    ) -> None:
        self.plan = plan
        self.analysis = analysis
        self.play = play
        self.meanings = read_meanings(analysis)
        self.stages = stages_of(plan)
        self.tables = tables_of_plan(plan, analysis, cluster)
        limit = memory if memory is not None else default_limit(cluster)
        # The plan may need more than the tables' part of the limit; then a forced plan may, too.
        self.room = self.stages * max(limit - certain_bytes(analysis), plan.predicted.memory)
        try:
            self.best = self._solve({})
        except Infeasible as error:  # the program's peak is below the sum of the tables
            self.room = error.minimum_memory * (1 + 1e-9)
            self.best = self._solve({})
        self.places = {
            (v.what, name): number
            for number, v in enumerate(self.tables.variables)
            for name in v.members or (v.name,)
        }

    @property
    def objective(self) -> float:
        """Seconds of a step of the best plan, as the search adds them up."""
        return self.best.cost / self.stages

    def alternatives(self, operator: str, progress: Progress | None = None) -> list[Alternative]:
        """The best plans with each strategy of an operator, the cheapest first."""
        variable = self.places["operator", operator]
        words = functools.partial(self._words, operator)
        axes = [axis.name for axis in self.plan.mesh]
        planned = tuple(self.plan.operators[operator].strategy)
        strategies = self.tables.strategies[operator]
        named = {
            choice: strategies.names(int(row))
            for choice, row in enumerate(self.tables.variables[variable].rows)
        }
        if len(named) > ALL:
            named = {
                c: n
                for c, n in named.items()
                if sum(a != b for a, b in zip(n, planned, strict=True)) <= 1
            }
        alternatives = []
        for number, (choice, names) in enumerate(named.items()):
            if progress:
                progress(number, len(named), " ".join(names))
            strategy = dict(zip(axes, names, strict=True))
            alternatives.append(
                self._forced(variable, choice, strategy, words(strategy), planned=names == planned)
            )
        return _in_order(alternatives)

    def storages(self, parameter: str) -> list[Alternative]:
        """The best plans with each storage layout of a parameter, the cheapest first.

        There are none if the parameter has no choice.
        """
        variable = self.places.get(("parameter", parameter))
        if variable is None:
            return []
        axes = [axis.name for axis in self.plan.mesh]
        shape = self.analysis.graph.tensors[parameter].shape
        planned = self.plan.parameters[parameter].storage
        storages = []
        for choice, row in enumerate(self.tables.variables[variable].rows):
            layout = self.tables.spaces[parameter].layout(int(row))
            strategy = dict(zip(axes, format_layout(layout).split(), strict=True))
            words = {
                axis: "whole" if text == "R" else f"dim {text[1:]} of {len(shape)} split"
                for axis, text in strategy.items()
            }
            storages.append(
                self._forced(
                    variable, choice, strategy, words, planned=format_layout(layout) == planned
                )
            )
        return _in_order(storages)

    def _solve(self, settled: Mapping[int, int]) -> Solution:
        graph = self.tables.graph
        return solve(condition(graph, settled) if settled else graph, memory_limit=self.room)

    def _forced(
        self,
        variable: int,
        choice: int,
        strategy: dict[str, str],
        words: dict[str, str],
        *,
        planned: bool,
    ) -> Alternative:
        try:
            solution = self._solve({variable: choice})
        except Infeasible:
            return Alternative(
                strategy=strategy, words=words, planned=planned, why="does not fit the memory"
            )
        except NoAssignment:
            return Alternative(
                strategy=strategy, words=words, planned=planned, why="no plan has it"
            )
        # The conditioned variable has one choice, which is number 0 there.
        choices = list(solution.choices)
        choices[variable] = choice
        graph = self.tables.graph
        changes = [
            float(table[there] - table[here]) / self.stages
            for table, here, there in zip(graph.unary, self.best.choices, choices, strict=True)
        ]
        objective = solution.cost / self.stages
        change = max(objective - self.objective, 0.0)
        step = (
            self.plan.predicted.step
            if planned
            else self._predicted(replace(solution, choices=tuple(choices)), change)
        )
        return Alternative(
            strategy=strategy,
            words=words,
            planned=planned,
            step=step,
            objective=objective,
            change=change,
            own=changes[variable],
            others=sum(changes) - changes[variable],
            moves=tuple(self._moves(choices)),
        )

    def _predicted(self, solution: Solution, change: float) -> float:
        """The predicted step of a solution: that of its program.

        With stages it is always the plan's step plus the change.
        """
        if self.stages > 1 or not self.play:
            return self.plan.predicted.step + change
        return evaluate(self.tables, solution, self.plan.schedule.in_stage).estimate.step

    def _words(self, operator: str, strategy: Mapping[str, str]) -> dict[str, str]:
        offer = self.analysis.offers[operator]
        inputs = next(op.inputs for op in self.analysis.warm if op.name == operator)
        options = {option.name: option for option in self.tables.strategies[operator].options}
        meanings = self.meanings
        return {
            axis: option_words(operator, offer, options[name], inputs, meanings)
            + (", gradients as shares" if name == "B" else "")
            for axis, name in strategy.items()
        }

    def _moves(self, choices: list[int]) -> Iterator[Difference]:
        """The redistributions that differ most from the best solution's."""
        best = self.best.choices
        edges = self.tables.graph.edges
        changes = sorted(
            (-abs(float(t[choices[u], choices[v]] - t[best[u], best[v]])), u, v)
            for (u, v), t in edges.items()
        )
        for change, u, v in changes[:TOLD]:
            if -change <= NEGLIGIBLE * self.best.cost:
                return
            seconds = [float(edges[u, v][c[u], c[v]]) / self.stages for c in (best, choices)]
            # Regions stand in the order of their first operators: either may read the other.
            if not self._tensor(u, v):
                u, v = v, u
            yield Difference(
                tensor=self._tensor(u, v),
                best=self._ends(u, v, best),
                forced=self._ends(u, v, choices),
                best_seconds=seconds[0],
                forced_seconds=seconds[1],
            )

    def _tensor(self, u: int, v: int) -> str:
        """The tensor that one variable hands to another (empty: none)."""
        source = self.tables.variables[u]
        target = self.tables.variables[v]
        if not source.members:
            return source.name
        if not target.members:
            return target.name
        made = {name for op in self._members(source) for name in op.outputs}
        read = (name for op in self._members(target) for name in op.inputs)
        return next((name for name in read if name in made), "")

    def _members(self, variable: Variable) -> list[Operator]:
        """The operators that a variable decides."""
        return [op for op in self.analysis.graph.operators if op.name in variable.members]

    def _ends(self, u: int, v: int, choices: tuple[int, ...] | list[int]) -> str:
        tensor = self._tensor(u, v)
        ends = [
            format_layout(self._layout(end, tensor, choices[end], made=end == u)) for end in (u, v)
        ]
        return " -> ".join(ends) if ends[0] != ends[1] else ends[0]

    def _layout(self, variable: int, tensor: str, choice: int, *, made: bool) -> Layout:
        """The layout of a tensor for a choice."""
        held = self.tables.variables[variable]
        row = int(held.rows[choice])
        if not held.members:
            return self.tables.spaces[tensor].layout(row)
        op = next(op for op in self._members(held) if tensor in (op.outputs if made else op.inputs))
        inputs, outputs = self.tables.strategies[op.name].layouts(row)
        return outputs[op.outputs.index(tensor)] if made else inputs[op.inputs.index(tensor)]


def _in_order(alternatives: list[Alternative]) -> list[Alternative]:
    return sorted(alternatives, key=lambda a: (a.step is None, a.step or 0.0, not a.planned))
