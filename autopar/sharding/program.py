"""The local program of a plan, free of any framework: operators and redistributions in order.

The cost model prices this program and the runtime executes it, so the priced collectives are the
issued ones. Values are addressed by (tensor, layout). A redistribution makes one more layout of a
tensor available, once for all its readers. The order of the step (`autopar/order`) decides when
each collective is issued.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.ir import Graph, Operator, Role

from .analysis import Offer
from .communication import Scales, axes_of_operands, has_largest, operator_traffic, scales_of
from .layout import Kind, Layout, is_valid, replicated
from .mesh import Axes, Mesh
from .notation import Rule
from .redistribution import change, changed_axes, local_bytes
from .rules import Call
from .schedule import PLAIN, Types
from .strategies import Option, Strategies


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One collective of a step over a group of mesh axes.

    `phase` is forward, backward or update; `nbytes` by the collective's convention. `most`: more
    bytes than data can ask for, where `nbytes` are the mean over data, else 0. `outermost`: the
    first of the axes along which the rows of an exchange go in turn, else -1.
    """

    phase: str
    kind: str
    axes: Axes
    nbytes: int
    tensor: str
    most: int = 0
    outermost: int = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A plan's decision for one operator: its options by axis, and the layouts that follow."""

    options: tuple[Option, ...]
    rule: Rule | None
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]

    @classmethod
    def cold(cls, operator: Operator, axes: int) -> Decision:
        """The decision for an operator of the preamble: on whole values, without a rule."""
        whole = replicated(axes)
        return cls(
            options=(),
            rule=None,
            inputs=(whole,) * len(operator.inputs),
            outputs=(whole,) * len(operator.outputs),
        )

    @classmethod
    def chosen(
        cls, options: Sequence[Option], offer: Offer, mesh: Sequence[int]
    ) -> Decision | None:
        """The decision for options, one an axis; None where they do not divide the sizes."""
        call = offer.call
        inputs = tuple(tuple(o.inputs[i] for o in options) for i in range(len(call.inputs)))
        outputs = tuple(tuple(o.outputs[i] for o in options) for i in range(len(call.outputs)))
        pairs = zip((*call.inputs, *call.outputs), (*inputs, *outputs), strict=True)
        if not all(is_valid(layout, tensor.shape, mesh) for tensor, layout in pairs):
            return None
        return cls(options=tuple(options), rule=offer.rule, inputs=inputs, outputs=outputs)


def talking(decision: Decision) -> tuple[Axes, ...]:
    """The axes of each option that communicates inside the operator, by factor."""
    axes_of: dict[tuple[str, int], list[int]] = {}
    for axis, option in enumerate(decision.options):
        if option.communication is not None:
            axes_of.setdefault((option.communication, option.factor), []).append(axis)
    return tuple(map(tuple, axes_of.values()))


def scaling(graph: Graph, step: Compute, mesh: Sequence[int]) -> tuple[Axes, ...]:
    """The axes over which an operator needs the largest element of each of its operands."""
    inputs = step.decision.inputs
    call = Call.of(graph, step.operator)
    return axes_of_operands(call, inputs, step.decision.outputs[0], mesh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Redistribute:
    """Redistribute `tensor` along the layouts of `chain`.

    `gradient`: whether the loss's backward pass runs through it. `differentiable`: whether a
    gradient may come back at all, including one from a loss that the caller computes from the
    outputs. The first `bucketed` steps (R → B of a parameter) are not executed one by one: their
    backward all-reduce is part of a gradient bucket.
    """

    tensor: str
    chain: tuple[Layout, ...]
    gradient: bool
    differentiable: bool = False
    bucketed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Run `operator` on the local shards."""

    operator: Operator
    decision: Decision


Step = Redistribute | Compute


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """Gradients of `parameters` that are summed together, by one all-reduce for each of `sums`.

    Low-rank gradients have two buckets, one after the other: `factor` is 1 and 2, and `ranks` holds
    the columns of the factors. Plain gradients have `factor` 0.
    """

    parameters: tuple[str, ...]
    sums: tuple[Axes, ...]
    nbytes: int
    factor: int = 0
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """All decisions of a plan inside one stage; `chains` lists every redistribution that it
    executes.

    `host`: the parameters whose optimizer state is in the memory of the device's host. `matrices`:
    those that the optimizer updates as whole matrices, each at its owner (see `order/owners.py`).
    """

    mesh: Mesh
    decisions: Mapping[str, Decision]
    storage: Mapping[str, Layout]
    outputs: Mapping[str, Layout]
    chains: Mapping[str, tuple[tuple[Layout, ...], ...]]
    gradients: frozenset[str] = field(default_factory=frozenset)
    host: frozenset[str] = field(default_factory=frozenset)
    matrices: frozenset[str] = field(default_factory=frozenset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Steps in execution order, and where every value lies."""

    graph: Graph
    assignment: Assignment
    steps: tuple[Step, ...]


def inputs_read(program: Program) -> tuple[tuple[str, Layout], ...]:
    """The model's inputs with every layout in which they are read."""
    tensors = program.graph.tensors
    computed = (step for step in program.steps if isinstance(step, Compute))
    read = [
        pair
        for step in computed
        for pair in zip(step.operator.inputs, step.decision.inputs, strict=True)
    ]
    return tuple(
        dict.fromkeys(
            pair
            for pair in (*read, *program.assignment.outputs.items())
            if tensors[pair[0]].role is Role.INPUT
        )
    )


def speaks(step: Compute) -> bool:
    """Whether an operator may issue collectives inside itself."""
    if step.decision.rule is None:
        return False
    within = any(option.communication is not None for option in step.decision.options)
    return within or has_largest(step.operator)


def operator_collectives(
    graph: Graph, step: Compute, mesh: Sequence[int], gradients: frozenset[str]
) -> list[Collective]:
    """The collectives that an operator issues inside itself, forward, then backward."""
    operator = step.operator
    decision = step.decision
    assert decision.rule is not None
    # Written as a table of one strategy, so that the search's prices and this list come from one
    # function.
    options = tuple(dict.fromkeys(decision.options))
    choice = np.array([[options.index(option) for option in decision.options]], dtype=np.int64)
    strategies = Strategies(rule=decision.rule, options=options, choices=choice)
    traffic = list(operator_traffic(Call.of(graph, operator), strategies, mesh, gradients))
    ordered = [
        (axes, move)
        for phase in ("forward", "backward")
        # On the way home, exchanges along several factors or axes come in the opposite order, but
        # the moves of each are listed as they are issued.
        for home in (False, True)
        for _, axes, moves in (reversed(traffic) if home else traffic)
        for move in moves
        if (move.phase, move.inside_first) == (phase, home)
    ]
    return [
        Collective(
            phase=move.phase,
            kind=move.kind,
            axes=axes,
            nbytes=round(float(move.nbytes[0])),
            tensor=operator.outputs[0],
            most=0 if move.most is None else round(float(move.most[0])),
            outermost=-1 if move.outermost is None else int(move.outermost[0]),
        )
        for axes, move in ordered
    ]


def only_casts(step: Redistribute) -> bool:
    """Whether a redistribution is a cast of a stored shard, which stays where it is."""
    return len(step.chain) == 1


def moves_value(step: Redistribute) -> bool:
    """Whether a redistribution changes the value.

    It does if it casts, or if a step of its chain is neither R to B nor B to R.
    """
    pairs = itertools.pairwise(step.chain[step.bucketed :])
    moved = (
        (before[axis], after[axis])
        for before, after in pairs
        # A step changes all its axes alike, so the first one stands for them.
        for axis in changed_axes(before, after)[:1]
    )
    return only_casts(step) or any(
        Kind.SPLIT in (before.kind, after.kind) or after.kind is Kind.PARTIAL
        for before, after in moved
    )


def scales_made(graph: Graph, step: Redistribute, mesh: Sequence[int]) -> tuple[Scales, ...]:
    """The scales that a redistribution makes, if it brings a parameter to its narrow copy."""
    if not moves_value(step):
        return ()
    return scales_of(graph.tensors[step.tensor], step.chain[0], step.chain[-1], mesh)


def summed_scales(graph: Graph, step: Redistribute, mesh: Sequence[int]) -> list[Scales]:
    """The scales among them for which ranks talk."""
    return [scales for scales in scales_made(graph, step, mesh) if scales.axes]


def chain_collectives(
    graph: Graph, step: Redistribute, mesh: Sequence[int], types: Types = PLAIN.types
) -> tuple[list[Collective], list[Collective]]:
    """The collectives of one redistribution in forward order: (forward ones, backward ones)."""
    tensor = graph.tensors[step.tensor]
    forward = [
        Collective(
            phase="forward",
            kind="all_reduce",
            axes=scales.axes,
            nbytes=scales.nbytes,
            tensor=step.tensor,
        )
        for scales in summed_scales(graph, step, mesh)
    ]
    backward: list[Collective] = []
    for index, (before, after) in enumerate(itertools.pairwise(step.chain)):
        moved = change(before, after, mesh)
        ahead, back = moved.transfers
        if ahead:
            size = ahead.scale * local_bytes(before, tensor.bytes, mesh)
            forward.append(
                Collective(
                    phase="forward",
                    kind=ahead.collective,
                    axes=moved.axes,
                    nbytes=size,
                    tensor=step.tensor,
                )
            )
        # Gradients of parameters may travel in another type than values; the shard is the same.
        if back and step.gradient and index >= step.bucketed:
            size = back.scale * local_bytes(before, types.reduced_bytes(tensor), mesh)
            backward.append(
                Collective(
                    phase="backward",
                    kind=back.collective,
                    axes=moved.axes,
                    nbytes=size,
                    tensor=step.tensor,
                )
            )
    return forward, backward


def departure(step: Redistribute, mesh: Sequence[int]) -> int | None:
    """The index of the first step of a chain that communicates; None if none does.

    From there to the first reader the chain runs alongside computation.
    """
    for number, (before, after) in enumerate(itertools.pairwise(step.chain)):
        moved = change(before, after, mesh)
        ahead, back = moved.transfers
        if moved.degree > 1 and (ahead or (back and step.differentiable)):
            return number
    return None
