"""Values that autograd keeps from the forward to the backward pass.

They are facts of operators and shares of their keepers. A value is saved in its reader's layout: of
a gathered value the gathered copy lives on. A value that k operators keep is one memory if they use
it in the same layout, so each bears 1/k of it. A view's memory is all of its source's.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autopar.ir import Graph, Operator, Role
from autopar.ir.recipes import ATTENTIONS
from autopar.sharding.analysis import Analysis
from autopar.sharding.rules import RULES, Call
from autopar.sharding.rules.saved_for_backward import (
    TORCH,
    Keeps,
    Made,
    Saving,
    backward_scratch,
    keeps,
    passes_gradient,
    shares_memory,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """An operator's effects on memory, whatever the layouts.

    `view`: its outputs are its first input's memory. `keeps`: the values saved for its backward
    pass. `flows`: its inputs with a gradient, and whether that is (a view of) the output's.
    `scratch`: temporaries of its backward pass. `backward`: whether it has one.
    """

    view: bool
    keeps: Keeps
    flows: tuple[tuple[int, bool], ...]
    scratch: tuple[Made, ...]
    backward: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """An operator's share of a saved value.

    `nbytes`: for each element of its input (or output) at `position`. `made`: the buffer that it
    is, if it is no tensor of the graph.
    """

    output: bool
    position: int
    nbytes: float
    weight: bool = False
    made: Made | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedValues:
    """The saved values of a graph.

    `shares`: of every operator that keeps something. `weights`: parameters that are saved in their
    used layouts. `passing`: shares of the last recomputed segment's operators while it is
    recomputed.
    """

    shares: Mapping[str, tuple[Share, ...]]
    weights: frozenset[str]
    passing: Mapping[str, tuple[Share, ...]] = field(default_factory=dict)


@functools.lru_cache(maxsize=16)
def facts_of(analysis: Analysis, saving: Saving = TORCH) -> Mapping[str, Facts]:
    """Return the facts of every operator of a graph, remembered for the last few graphs."""
    graph = analysis.graph
    gradients = analysis.gradients
    orders = _Orders(graph)
    known: dict[object, Facts] = {}
    facts: dict[str, Facts] = {}
    for operator in graph.operators:
        contiguous = orders.visit(operator)
        flows = tuple(name in gradients for name in operator.inputs)
        backward = any(name in gradients for name in operator.outputs)
        key = (graph.operator_fingerprint(operator), contiguous, flows, backward)
        if key not in known:
            call = Call.of(graph, operator)
            view = operator.kind in RULES and shares_memory(call, contiguous=contiguous)
            known[key] = Facts(
                view=view,
                keeps=keeps(call, flows, saving) if backward else Keeps(),
                flows=tuple(
                    (i, passes_gradient(call, i, view=view))
                    for i, flows in enumerate(flows)
                    if flows and backward
                ),
                scratch=backward_scratch(call, saving) if backward else (),
                backward=backward,
            )
        facts[operator.name] = known[key]
        orders.make(operator, known[key].view)
    return facts


class _Orders:
    """The order of every tensor's dims in memory, outermost first; None: with gaps or repeats."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.orders: dict[str, tuple[int, ...] | None] = {}

    def of(self, name: str) -> tuple[int, ...] | None:
        return self.orders.get(name, tuple(range(len(self.graph.tensors[name].shape))))

    def visit(self, operator: Operator) -> bool:
        """Whether the first input lies in the order of its dims."""
        return not operator.inputs or self.of(operator.inputs[0]) == tuple(
            range(len(self.graph.tensors[operator.inputs[0]].shape))
        )

    def make(self, operator: Operator, view: bool) -> None:
        """Note the order of the elements of an operator's outputs."""
        kind = operator.kind
        tensors = self.graph.tensors
        if kind in ATTENTIONS and len(tensors[operator.outputs[0]].shape) == 4:
            # Flash attention writes the heads of a token side by side.
            self.orders[operator.outputs[0]] = (0, 2, 1, 3)
        if not view:
            return
        source = operator.inputs[0]
        before = tensors[source].shape
        order = self.of(source)
        for name in operator.outputs:
            after = tensors[name].shape
            if before == after and kind not in _PERMUTING:
                self.orders[name] = order
            elif kind in _PERMUTING:
                self.orders[name] = _permuted(operator, order, len(after))
            elif (
                len(operator.outputs) > 1
                or tensors[name].size != tensors[source].size
                or order != tuple(range(len(before)))
            ):
                # Pieces have gaps; a view of permuted memory is not followed any further.
                self.orders[name] = None


_PERMUTING = frozenset(
    ("aten.transpose.int", "aten.permute.default", "aten.t.default", "aten.mT.default")
)


def _permuted(
    operator: Operator, order: tuple[int, ...] | None, rank: int
) -> tuple[int, ...] | None:
    """The order of the dims after they are permuted: where each dim of memory went."""
    if order is None:
        return None
    dims = list(range(rank))
    given = operator.attributes.get("dims", operator.attributes.get("perm"))
    if isinstance(given, tuple):
        dims = [int(d) % rank for d in given if isinstance(d, int)]
    elif rank >= 2:
        one, other = (
            operator.attributes.get(name, default) for name, default in (("dim0", -1), ("dim1", -2))
        )
        assert isinstance(one, int) and isinstance(other, int)
        dims[one], dims[other] = dims[other], dims[one]
    return tuple(dims.index(d) for d in order)


def saved_values(
    analysis: Analysis, segments: Sequence[Sequence[str]] = (), saving: Saving = TORCH
) -> SavedValues:
    """The shares of every operator; nothing is saved outside training.

    Operators of `segments` are recomputed in the backward pass: only the inputs of each segment
    are saved.
    """
    if not analysis.train:
        return SavedValues(shares={}, weights=frozenset())
    facts = facts_of(analysis, saving)
    tensors = analysis.graph.tensors
    segment_of = {name: number for number, segment in enumerate(segments) for name in segment}
    roots = roots_of(analysis, facts)
    places = places_saved(analysis, facts, segment_of)
    count = Counter(roots.get(name, name) for listed in places.values() for _, _, name in listed)
    shares: dict[str, tuple[Share, ...]] = {}
    for op in analysis.warm:
        made = () if op.name in segment_of else facts[op.name].keeps.made
        own = [
            Share(output=one.output, position=one.position, nbytes=one.nbytes, made=one)
            for one in made
        ]
        for output, position, name in places[op.name]:
            root = roots.get(name, name)
            # A view keeps all of its source's memory, and all keepers of that bear equal shares.
            nbytes = tensors[root].bytes / max(tensors[name].size, 1) / count[root]
            weight = tensors[root].role is Role.PARAMETER
            own.append(Share(output=output, position=position, nbytes=nbytes, weight=weight))
        if own:
            shares[op.name] = tuple(own)
    used = frozenset(name for name in count if tensors[name].role is Role.PARAMETER)
    return SavedValues(
        shares=shares,
        weights=used,
        passing=_passing(analysis, segments[-1], saving) if segments else {},
    )


def roots_of(analysis: Analysis, facts: Mapping[str, Facts]) -> dict[str, str]:
    """The tensor whose memory each view is, through views of views."""
    roots: dict[str, str] = {}
    for op in analysis.warm:
        if facts[op.name].view:
            roots.update((name, roots.get(op.inputs[0], op.inputs[0])) for name in op.outputs)
    return roots


def places_saved(
    analysis: Analysis, facts: Mapping[str, Facts], segment_of: Mapping[str, int]
) -> dict[str, list[tuple[bool, int, str]]]:
    """The values that each operator saves: whether an output, its position, and its name."""
    tensors = analysis.graph.tensors
    roots = roots_of(analysis, facts)
    places: dict[str, list[tuple[bool, int, str]]] = {}
    made_in: dict[str, int] = {}
    for op in analysis.warm:
        segment = segment_of.get(op.name, -1)
        made_in.update(dict.fromkeys(op.outputs, segment))
        saved = facts[op.name].keeps
        places[op.name] = [(False, i, op.inputs[i]) for i in saved.inputs] + [
            (True, i, op.outputs[i]) for i in saved.outputs
        ]
        if segment >= 0:
            # A recomputed operator saves only parameters, also through views that are made in its
            # segment, and what enters this.
            weights = [
                place
                for place in places[op.name]
                if tensors[roots.get(place[2], place[2])].role is Role.PARAMETER
            ]
            entering = [
                (False, i, name)
                for i, name in enumerate(op.inputs)
                if name in made_in and made_in[name] != segment
            ]
            places[op.name] = list(dict.fromkeys(weights + entering))
    return places


def _passing(
    analysis: Analysis, segment: Sequence[str], saving: Saving
) -> dict[str, tuple[Share, ...]]:
    """Shares of a segment's operators while it is recomputed: activations only."""
    shares = saved_values(analysis, (), saving).shares
    activations = (
        (name, tuple(share for share in shares.get(name, ()) if not share.weight))
        for name in segment
    )
    return {name: mine for name, mine in activations if mine}
