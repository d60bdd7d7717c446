"""A folded solution as a solution of the whole graph.

Every operator takes the strategy of its representative in the folded graph, and every tensor the
layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from autopar.planning.model.folding import Folding
from autopar.planning.tables import Tables
from autopar.planning.tables.tables import Variable
from autopar.search import NoAssignment, Solution, condition, solve
from autopar.sharding.analysis import Analysis

Taken = tuple[tuple[int, ...], bool]
"""The options of an operator, or the layout of a parameter, and whether state is on the host."""


def unfold(
    tables: Tables, choices: Iterable[int], folding: Folding, analysis: Analysis
) -> tuple[Tables, tuple[int, ...]]:
    """The tables and choices of the whole graph, each variable with its representative's choice.

    Where layers are folded, the tables keep the folded cost graph, which does not fit their
    variables.
    """
    # Nothing was folded, so the variables are the same.
    if len(folding.graph.operators) == len(analysis.graph.operators):
        return replace(tables, analysis=analysis), tuple(choices)
    chosen = {
        (v.what, name): (v, choice)
        for v, choice in zip(tables.variables, choices, strict=True)
        for name in v.members or (v.name,)
    }
    pairs = [
        (_alone(chosen[what, short][0], name), chosen[what, short][1])
        for what, name, short in _names(folding, chosen)
    ]
    tensors = ((name, folding.tensors[name]) for name in analysis.graph.tensors)
    operators = ((op.name, folding.operators[op.name]) for op in analysis.graph.operators)
    whole = replace(
        tables,
        analysis=analysis,
        variables=tuple(variable for variable, _ in pairs),
        spaces={name: tables.spaces[short] for name, short in tensors if short in tables.spaces},
        strategies={
            name: tables.strategies[short]
            for name, short in operators
            if short in tables.strategies
        },
    )
    return whole, tuple(choice for _, choice in pairs)


def on_whole(
    folded: Tables, solution: Solution, folding: Folding, tables: Tables
) -> Solution | None:
    """Return a folded solution as one of the whole graph's tables, or None if these lack it."""
    unfolded, choices = unfold(folded, solution.choices, folding, tables.analysis)
    wanted = {
        (v.what, name): _taken(unfolded, v, name, choice)
        for v, choice in zip(unfolded.variables, choices, strict=True)
        if v.what in ("operator", "parameter")
        for name in v.members or (v.name,)
    }
    return settled(tables, wanted, solution.lower_bound)


def _alone(variable: Variable, name: str) -> Variable:
    """The variable of one operator or tensor that it decides, under another name."""
    return replace(variable, name=name, members=(name,) if variable.members else ())


def _taken(tables: Tables, variable: Variable, name: str, choice: int) -> Taken:
    """The choice of a variable for one of the operators, or the parameter, that it decides."""
    row = int(variable.rows[choice])
    options = tables.strategies[name].choices[row].tolist() if variable.members else [row]
    return tuple(options), variable.host is not None and bool(variable.host[choice] > 0)


def settled(
    tables: Tables, wanted: Mapping[tuple[str, str], Taken], bound: float
) -> Solution | None:
    """Return the best solution with all operators and parameters as `wanted`, by kind and name.

    Returns None if the tables do not offer it.

    `bound`: of all solutions.
    """
    fixed: dict[int, int] = {}
    for number, variable in enumerate(tables.variables):
        # Fan-outs and outputs are chosen anew, as layers may join in other ways.
        if variable.what in ("operator", "parameter"):
            same = (
                choice
                for choice in range(len(variable.rows))
                if all(
                    _taken(tables, variable, name, choice) == wanted[variable.what, name]
                    for name in variable.members or (variable.name,)
                )
            )
            if (taken := next(same, None)) is None:
                return None
            fixed[number] = taken
    try:
        rest = solve(condition(tables.graph, fixed))
    except NoAssignment:
        return None
    choices = tuple(fixed.get(number, choice) for number, choice in enumerate(rest.choices))
    cost = tables.graph.cost(choices)
    return replace(
        rest,
        choices=choices,
        cost=cost,
        # Rounding may put the cost just below the bound.
        lower_bound=min(bound, cost),
        memory=tables.graph.memory_of(choices),
    )


def _names(folding: Folding, chosen: Iterable[tuple[str, str]]) -> Iterator[tuple[str, str, str]]:
    """For every variable of the whole graph: its kind, its name, and its representative's name."""
    known = set(chosen)
    for name, short in folding.operators.items():
        if ("operator", short) in known:
            yield "operator", name, short
    for name, short in folding.tensors.items():
        for what in ("parameter", "fan-out", "output"):
            if (what, short) in known:
                yield what, name, short
