"""`raised`: a graph in which operators that are one thing to the field are one operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.ir import Graph, Operator, needed_operators

from .attention import attention
from .index_scores import index_scores
from .norms import norm
from .rotation import rotation
from .spelling import Spelling, word

Row = Callable[[Operator, Spelling], Operator | None]
ROWS: tuple[Row, ...] = (norm, rotation, attention, index_scores)
"""What is known by a name: each row reads the last operator that it takes the place of."""


def raised(graph: Graph) -> Graph:
    """The graph with an operator of its own for each thing that a row knows, of equal values.

    Views that change no shape go.
    """
    spelling = Spelling(graph)
    instead: dict[str, Operator] = {}
    same: dict[str, str] = {}
    for operator in graph.operators:
        if _is_idle(operator, spelling):
            same[operator.outputs[0]] = same.get(operator.inputs[0], operator.inputs[0])
        for row in ROWS:
            if (found := row(operator, spelling)) is not None:
                instead[found.outputs[0]] = found
    if not instead and not same:
        return graph
    names = {operator.name for operator in graph.operators}
    operators = []
    for operator in graph.operators:
        if operator.outputs[:1] and operator.outputs[0] in same:
            continue
        found = instead.get(operator.outputs[0], operator) if operator.outputs else operator
        found = replace(found, inputs=tuple(same.get(name, name) for name in found.inputs))
        operators.append(found if found.name == operator.name else _renamed(found, names))
    return _without_needless(replace(graph, operators=tuple(operators)))


def _is_idle(operator: Operator, spelling: Spelling) -> bool:
    """Whether an operator gives its input under another name."""
    if word(operator) not in ("view", "reshape") or operator.outputs[0] in spelling.kept:
        return False
    return spelling.shape(operator.inputs[0]) == spelling.shape(operator.outputs[0])


def _renamed(operator: Operator, names: set[str]) -> Operator:
    """The operator under a name that no other one has."""
    name = operator.name
    count = 0
    while name in names:
        count += 1
        name = f"{operator.name}.{count}"
    names.add(name)
    return replace(operator, name=name)


def _without_needless(graph: Graph) -> Graph:
    """The graph without what nothing needs any more; stored tensors and inputs stay."""
    wanted = {*graph.outputs, *graph.updates.values(), *((graph.loss,) if graph.loss else ())}
    operators = needed_operators(graph.operators, wanted)
    gone = {name for op in graph.operators for name in op.outputs}
    gone -= {name for op in operators for name in op.outputs}
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name not in gone}
    return replace(graph, operators=operators, tensors=tensors)
