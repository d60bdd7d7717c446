"""From wanted placements of all operators straight to an assignment, without a search.

On each axis an operator takes an option whose outputs have the wanted placement; an option that
splits a factor comes before one that does not. A parameter is stored split as its first reader uses
it and replicated on the other axes, unless the scheme splits its storage there.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from autopar.errors import UsageError
from autopar.ir import Role, Tensor
from autopar.sharding.analysis import Analysis, Offer
from autopar.sharding.layout import B, Kind, Layout, Placement, R, S, is_valid
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Assignment, Decision
from autopar.sharding.redistribution import changed_axes, cheapest_chain, is_step
from autopar.sharding.strategies import Option

Pin = Placement | tuple[Placement, Placement]
"""The placement of an operator's outputs (of its first input if the output is scalar), or that and
its last input's.
"""
Wanted = Mapping[str, Sequence[Pin]]
"""For every operator its pin on each axis."""


def pinned_assignment(
    analysis: Analysis, mesh: Mesh, wanted: Wanted, *, split_storage: Sequence[int] = ()
) -> Assignment:
    """Decide every operator as wanted.

    `split_storage`: axes over which stored parameters are split too (ZeRO-3), on the first dim that
    divides. Raises `UsageError` that names the operator without a fitting option, or the one whose
    sizes the mesh does not divide.
    """
    decisions: dict[str, Decision] = {}
    for op in analysis.graph.operators:
        if op.name in analysis.cold:
            decisions[op.name] = Decision.cold(op, len(mesh.axes))
            continue
        offer = analysis.offers[op.name]
        options = tuple(_option(op.name, offer, pin) for pin in wanted[op.name])
        decisions[op.name] = decision = _decision(offer, options)
        # Options fit by kind alone; whether the sizes divide depends on the mesh.
        tensors = zip(
            (*offer.call.inputs, *offer.call.outputs),
            (*decision.inputs, *decision.outputs),
            strict=True,
        )
        for tensor, layout in tensors:
            if not is_valid(layout, tensor.shape, mesh.shape):
                raise UsageError(
                    f"{op.name!r}: a tensor of shape {list(tensor.shape)} cannot be split evenly "
                    f"over the mesh {mesh}"
                )
    storage = _storage(analysis, mesh, decisions, split_storage)
    return _connected(analysis, mesh, decisions, storage)


@functools.lru_cache(maxsize=1 << 14)
def _of_outputs(options: tuple[Option, ...], pin: Pin, scalar: bool) -> Option | None:
    placement, last = pin if isinstance(pin, tuple) else (pin, None)
    fits = [
        o
        for o in options
        # A scalar, as a loss is, cannot be split: the input says what is wanted.
        if (o.inputs if scalar else o.outputs)[0] == placement and last in (None, o.inputs[-1])
    ]
    return min(fits, key=lambda o: o.factor < 0, default=None)


def _option(name: str, offer: Offer, pin: Pin) -> Option:
    option = _of_outputs(offer.options, pin, not offer.call.outputs[0].shape)
    if option is None:
        shown = " with weights as ".join(map(str, pin)) if isinstance(pin, tuple) else pin
        valid = ", ".join(dict.fromkeys(str(o.outputs[0]) for o in offer.options))
        raise UsageError(
            f"{name!r} ({offer.call.operator.kind}) cannot give its output as {shown}; it can as "
            f"{valid}"
        )
    return option


@functools.lru_cache(maxsize=1 << 14)
def _layouts(options: tuple[Option, ...]) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    ins = tuple(zip(*(o.inputs for o in options), strict=True)) if options else ()
    outs = tuple(zip(*(o.outputs for o in options), strict=True)) if options else ()
    return ins, outs


def _decision(offer: Offer, options: tuple[Option, ...]) -> Decision:
    inputs, outputs = _layouts(options)
    # On a mesh without axes every layout is empty, and `zip` cannot say how many there are.
    if not options:
        inputs = ((),) * len(offer.call.inputs)
        outputs = ((),) * len(offer.call.outputs)
    return Decision(options=options, rule=offer.rule, inputs=inputs, outputs=outputs)


def _storage(
    analysis: Analysis, mesh: Mesh, decisions: Mapping[str, Decision], split: Sequence[int]
) -> dict[str, Layout]:
    """Storage split as in the first reader, then over `split` on the first dim that divides."""
    storage: dict[str, Layout] = {}
    for tensor in analysis.graph.parameters:
        layout: Layout = (R,) * len(mesh.axes)
        for index, position in analysis.readers.get(tensor.name, ())[:1]:
            used = decisions[analysis.graph.operators[index].name].inputs[position]
            # B is no storage: a stored parameter is R, and its gradient is summed on the way.
            layout = tuple(p if p.kind is Kind.SPLIT else R for p in used)
        for axis in split:
            layout = _also_split(tensor, layout, axis, mesh)
        storage[tensor.name] = layout
    return storage


def _also_split(tensor: Tensor, layout: Layout, axis: int, mesh: Mesh) -> Layout:
    for dim in range(len(tensor.shape)):
        after = (*layout[:axis], S(dim), *layout[axis + 1 :])
        if layout[axis] == R and is_valid(after, tensor.shape, mesh.shape):
            return after
    return layout


def _connected(
    analysis: Analysis, mesh: Mesh, decisions: Mapping[str, Decision], storage: Mapping[str, Layout]
) -> Assignment:
    """Add a redistribution wherever a reader's layout differs from the stored or computed one."""
    graph = analysis.graph
    whole: Layout = (R,) * len(mesh.axes)
    home = {
        t.name: storage.get(t.name, whole)
        for t in graph.tensors.values()
        if t.role is not Role.ACTIVATION
    }
    chains: dict[str, dict[Layout, tuple[Layout, ...]]] = {}

    def connect(name: str, target: Layout) -> None:
        if target != home[name] and target not in chains.get(name, {}):
            tensor = graph.tensors[name]
            chain = _chain(home[name], target, tensor.shape, mesh.shape, name in analysis.gradients)
            chains.setdefault(name, {})[target] = chain

    for op in graph.operators:
        decision = decisions[op.name]
        for name, layout in zip(op.inputs, decision.inputs, strict=True):
            connect(name, layout)
        home.update(zip(op.outputs, decision.outputs, strict=True))
    # The loss is wanted on every rank; other outputs may stay as they are made.
    outputs = {name: whole if name == graph.loss else home[name] for name in analysis.outputs}
    for name, layout in outputs.items():
        connect(name, layout)
    return Assignment(
        mesh=mesh,
        decisions=decisions,
        storage=storage,
        outputs=outputs,
        gradients=analysis.gradients,
        chains={name: tuple(by_layout.values()) for name, by_layout in chains.items()},
    )


@functools.lru_cache(maxsize=1 << 14)
def _chain(
    source: Layout, target: Layout, shape: tuple[int, ...], mesh: tuple[int, ...], gradient: bool
) -> tuple[Layout, ...]:
    """The chain of least traffic, axis by axis: every byte costs the same, and a collective as much
    as 1 MB.
    """
    if not gradient:
        source, target = (tuple(R if p == B else p for p in layout) for layout in (source, target))
    # Most are single steps, which need no search.
    if len(changed_axes(source, target)) == 1 and is_step(source, target):
        return (source, target)
    return cheapest_chain(
        source,
        target,
        shape,
        1,
        mesh,
        lambda kind, axes, nbytes: 1e6 + nbytes,
        gradient=gradient,
        apart=True,
    )
