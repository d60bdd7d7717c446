"""`raised`: a graph in which operators that are one thing to the field are one operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.ir import Graph, Operator, needed_operators
from autopar.ir.graph import unused_name

from .activations import activation
from .attention import attention
from .bodies import Trees
from .causal import causal_convolution
from .index_scores import index_scores
from .joins import join
from .linear_losses import linear_cross_entropy
from .norms import norm
from .rotation import rotation
from .spelling import Spelling, word

Row = Callable[[Operator, Spelling], Operator | None]
ROWS: tuple[Row, ...] = (
    norm,
    rotation,
    attention,
    index_scores,
    causal_convolution,
    join,
    activation,
    linear_cross_entropy,
)
"""What is known by a name: each row reads the last operator that it takes the place of."""


def raised(graph: Graph, rows: Sequence[Row] = ROWS) -> Graph:
    """The graph with an operator of its own for each thing that a row knows, of equal values.

    Views that change no shape go.
    """
    spelling = Spelling(graph)
    instead: dict[str, Operator] = {}
    same: dict[str, str] = {}
    for operator in graph.operators:
        if _is_idle(operator, spelling):
            same[operator.outputs[0]] = same.get(operator.inputs[0], operator.inputs[0])
        for row in rows:
            if (whole := row(operator, spelling)) is not None:
                instead[whole.outputs[0]] = whole
    # A row may end in a view that goes.
    ends = {same.get(name, name): operator for name, operator in instead.items()}
    instead = {name: replace(operator, outputs=(name,)) for name, operator in ends.items()}
    spelling = Spelling(_with(spelling, instead, same))
    return _with(spelling, Trees(spelling).instead, {})


def _with(spelling: Spelling, instead: Mapping[str, Operator], same: Mapping[str, str]) -> Graph:
    """The graph with some operators in the place of others that make the same.

    `same`: tensors that go, each with the one that is read in its place.
    """
    graph = spelling.graph
    if not instead and not same:
        return graph
    operators = [
        instead.get(operator.outputs[0], operator)
        for operator in graph.operators
        if operator.outputs[0] not in same
    ]
    needed = needed_operators(
        [replace(op, inputs=tuple(same.get(name, name) for name in op.inputs)) for op in operators],
        spelling.leaving,
    )
    gone = spelling.makers.keys() - {name for operator in needed for name in operator.outputs}
    tensors = {name: tensor for name, tensor in graph.tensors.items() if name not in gone}
    return replace(graph, operators=tuple(_named(needed)), tensors=tensors)


def _is_idle(operator: Operator, spelling: Spelling) -> bool:
    """Whether an operator gives its input under another name."""
    if word(operator) not in ("alias", "view", "reshape"):
        return False
    ends = (operator.inputs[0], operator.outputs[0])
    same = len({(spelling.shape(name), spelling.dtype(name)) for name in ends}) == 1
    return same and operator.outputs[0] not in spelling.leaving


def _named(operators: Iterable[Operator]) -> Iterator[Operator]:
    """The operators, each under a name that no other one has."""
    names: set[str] = set()
    for operator in operators:
        name = unused_name(operator.name, names, ".")
        names.add(name)
        yield operator if name == operator.name else replace(operator, name=name)
