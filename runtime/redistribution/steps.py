"""Redistribution on real ranks: every step, over one axis or over several, as an autograd function.

A step between two kinds is a pair of actions, one on the value and one on the gradient:

    R → B   nothing / all_reduce        S → R   all_gather / take
    R → S   take / all_gather           S → B   all_gather / reduce_scatter
    R → P   keep / nothing              S → S'  all_to_all / all_to_all
    B → R   nothing / keep              S → P   pad / take
    B → S   take / pad                  P → R   all_reduce / nothing
    B → P   keep / keep                 P → S   reduce_scatter / all_gather
                                        P → B   all_reduce / all_reduce

`take` slices this rank's shard, `pad` surrounds it with zeros, `keep` leaves the value on
coordinate 0 and zeros elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from autopar.errors import PlanError
from autopar.runtime.ranks.collectives import (
    arrived,
    begin_all_gather,
    begin_all_reduce,
    begin_all_to_all,
    begin_reduce_scatter,
)
from autopar.runtime.ranks.cuts import join, pad, take
from autopar.runtime.ranks.device_groups import AxisGroup, DeviceGroups
from autopar.sharding.layout import Kind, Layout, R, local_parts
from autopar.sharding.redistribution import changed_axes


class Move(NamedTuple):
    """An action on a value (or a gradient).

    `dim`, `parts`: the split that is gathered or made; `into_dim`, `into_parts`: the split that an
    all-to-all makes.
    """

    name: str
    dim: int = -1
    parts: int = 1
    into_dim: int = -1
    into_parts: int = 1
    reduction: str = "sum"


Chain = tuple[tuple[Move, Move, AxisGroup], ...]
"""Steps: the action on the value, the action on its gradient, and the group."""

ON_ONE_DEVICE = frozenset(("nothing", "take", "pad", "keep"))
"""Actions that communicate nothing."""


def _is_local(action: Move, group: AxisGroup) -> bool:
    return action.name in ON_ONE_DEVICE or group.size == 1


def begin(value: Tensor, action: Move, group: AxisGroup) -> Tensor:
    """Start the collective of an action; `finish` gives its result."""
    match action.name:
        case "all_reduce":
            return begin_all_reduce(value, group, action.reduction)
        case "all_gather":
            return begin_all_gather(value, group)
        case "reduce_scatter":
            return begin_reduce_scatter(value, action.dim, action.parts, group)
        case "all_to_all":
            return begin_all_to_all(value, action.into_dim, action.into_parts, group)
    raise AssertionError(action.name)


def finish(coming: Tensor, action: Move, group: AxisGroup, before: Sequence[int]) -> Tensor:
    """Wait for the collective that `begin` started on a tensor of the shape `before`.

    The joined result is contiguous.
    """
    result = arrived(coming)
    shape = list(before)
    match action.name:
        case "all_gather":
            return join(result.view(group.size, *shape), action.dim, action.parts)
        case "reduce_scatter":
            shape[action.dim] //= group.size
        case "all_to_all":
            shape[action.into_dim] //= group.size
            return join(result.view(group.size, *shape), action.dim, action.parts)
    return result.view(shape)


def act(value: Tensor, action: Move, group: AxisGroup) -> Tensor:
    """Run one action; the result is contiguous."""
    match action.name:
        case "nothing":
            return value
        case "take":
            return take(value, action.dim, action.parts, group.size, group.coordinate).contiguous()
        case "pad":
            return pad(value, action.dim, action.parts, group.size, group.coordinate)
        case "keep":
            # Only one rank keeps its value, so that the sum over the group is that value.
            if group.coordinate == 0:
                return value
            # Collectives take memory as it lies: strides that differ between ranks give wrong sums.
            return torch.zeros_like(value, memory_format=torch.contiguous_format)
    if group.size == 1:
        return value
    return finish(begin(value, action, group), action, group, value.shape)


class _Step(torch.autograd.Function):
    """One action on the value, another on its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ahead: Move, back: Move, group: AxisGroup) -> Tensor:
        ctx.back = back
        ctx.group = group
        out = act(value, ahead, group)
        # Autograd wants another tensor than the input, or it takes the node for an identity.
        return out.view_as(out) if out is value else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return act(gradients[0], ctx.back, ctx.group), None, None, None


class _Departure(torch.autograd.Function):
    """Start the action on a value; backward, wait for the action on its gradient.

    Returns a stand-in for the value on the way (of its shape, without its memory if a collective
    runs), and the collective.
    """

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, ahead: Move, back: Move, group: AxisGroup
    ) -> tuple[Tensor, Tensor]:
        ctx.back = back
        ctx.group = group
        ctx.after = _shape_after(value.shape, ahead, group.size)
        if _is_local(ahead, group):
            tag = value.view_as(value)
            coming = value.new_empty(0)
        else:
            # The stand-in links the two nodes in autograd's graph; one element has its shape.
            tag = value.new_empty(()).expand(value.shape)
            coming = begin(value, ahead, group)
        # The gradient flows through the stand-in alone.
        ctx.mark_non_differentiable(coming)
        return tag, coming

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        gradient = gradients[0]
        if not _is_local(ctx.back, ctx.group):
            gradient = finish(gradient, ctx.back, ctx.group, ctx.after)
        return gradient, None, None, None


class _Arrival(torch.autograd.Function):
    """Wait for a departed value; backward, start the action on its gradient."""

    @staticmethod
    def forward(
        ctx: Any, tag: Tensor, coming: Tensor, ahead: Move, back: Move, group: AxisGroup
    ) -> Tensor:
        ctx.back = back
        ctx.group = group
        ctx.shape = tag.shape
        if _is_local(ahead, group):
            out = act(tag, ahead, group)
            return out.view_as(out) if out is tag else out
        return finish(coming, ahead, group, tag.shape)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        gradient = gradients[0]
        if _is_local(ctx.back, ctx.group):
            return act(gradient, ctx.back, ctx.group), None, None, None, None
        coming = begin(gradient, ctx.back, ctx.group)
        # Anomaly mode reads the gradient before it has come.
        if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
            coming = arrived(coming)
        return coming.view(ctx.shape), None, None, None, None


def _shape_after(shape: Sequence[int], action: Move, size: int) -> list[int]:
    """The local shape that an action leads to."""
    after = list(shape)
    if action.name in ("take", "reduce_scatter"):
        after[action.dim] //= size
    elif action.name in ("pad", "all_gather", "all_to_all"):
        after[action.dim] *= size
    if action.name == "all_to_all":
        after[action.into_dim] //= size
    return after


def depart(
    value: Tensor, ahead: Move, back: Move | None, group: AxisGroup
) -> tuple[Tensor, Tensor]:
    """Begin a step, which `arrive` ends; computation goes on in between.

    `back`: None if no gradient flows. Backward, the gradient's collective begins where the value
    arrived and is waited for where it departed.
    """
    if back is not None and value.requires_grad:
        _check_sum(ahead)
        pair: tuple[Tensor, Tensor] = _Departure.apply(  # type: ignore[no-untyped-call]
            value, ahead, back, group
        )
        return pair
    alone = value.detach()
    if _is_local(ahead, group):
        return alone, alone.new_empty(0)
    return alone.new_empty(()).expand(alone.shape), begin(alone, ahead, group)


def arrive(sent: tuple[Tensor, Tensor], ahead: Move, back: Move | None, group: AxisGroup) -> Tensor:
    """The value at the end of the step that `depart` began."""
    tag, coming = sent
    if back is not None and tag.requires_grad:
        out: Tensor = _Arrival.apply(  # type: ignore[no-untyped-call]
            tag, coming, ahead, back, group
        )
        return out
    if _is_local(ahead, group):
        return act(tag, ahead, group)
    return finish(coming, ahead, group, tag.shape)


def step(value: Tensor, ahead: Move, back: Move | None, group: AxisGroup) -> Tensor:
    """One step of a redistribution, waited for at once; `back` is None where no gradient flows."""
    if back is None or not value.requires_grad:
        return act(value.detach(), ahead, group)
    _check_sum(ahead)
    out: Tensor = _Step.apply(value, ahead, back, group)  # type: ignore[no-untyped-call]
    return out


def _check_sum(ahead: Move) -> None:
    # After a maximum or minimum no rank knows whose element it was.
    if ahead.reduction != "sum":
        raise PlanError(f"a partial {ahead.reduction} has no gradient")


def step_actions(before: Layout, after: Layout, mesh: Sequence[int]) -> tuple[Move, Move]:
    """The actions of a step on the value and on the gradient."""
    # A step over several axes does the same on each: the first one stands for all.
    axis = changed_axes(before, after)[0]
    split = Kind.SPLIT
    whole = Kind.REPLICATED
    share = Kind.BROADCAST
    partial = Kind.PARTIAL
    kinds = before[axis].kind, after[axis].kind
    sums = before[axis].reduction == after[axis].reduction == "sum"
    if not sums and after[axis].kind is not whole:
        raise PlanError(
            f"a partial {before[axis].reduction} can only be brought to R, not to {after[axis]}"
        )
    nothing = Move("nothing")
    keep = Move("keep")
    reduce = Move("all_reduce", reduction=before[axis].reduction)
    if kinds == (split, split):
        own = _dim(before, axis, mesh)
        other = _dim(after, axis, mesh)
        return Move("all_to_all", *own, *other), Move("all_to_all", *other, *own)
    dim, parts = _dim(before if before[axis].kind is split else after, axis, mesh)
    gather, scatter, take, pad = (
        Move(name, dim, parts) for name in ("all_gather", "reduce_scatter", "take", "pad")
    )
    table = {
        (whole, share): (nothing, reduce),
        (whole, split): (take, gather),
        (whole, partial): (keep, nothing),
        (share, whole): (nothing, keep),
        (share, split): (take, pad),
        (share, partial): (keep, keep),
        (split, whole): (gather, take),
        (split, share): (gather, scatter),
        (split, partial): (pad, take),
        (partial, whole): (reduce, nothing),
        (partial, split): (scatter, gather),
        (partial, share): (reduce, reduce),
    }
    return table[kinds]


def _dim(layout: Layout, axis: int, mesh: Sequence[int]) -> tuple[int, int]:
    if layout[axis].kind is not Kind.SPLIT:
        return -1, 1
    return layout[axis].dim, local_parts(layout, axis, mesh)


def apply_chain(
    value: Tensor, chain: Sequence[Layout], groups: DeviceGroups, *, gradient: bool
) -> Tensor:
    """Bring a local value along a chain of layouts."""
    for before, after in itertools.pairwise(chain):
        ahead, back = step_actions(before, after, groups.mesh.shape)
        group = groups.over(changed_axes(before, after))
        value = step(value, ahead, back if gradient else None, group)
    return value


def whole_chain(layout: Layout) -> list[Layout]:
    """The chain that gathers and sums a tensor to the whole one, the innermost axis first."""
    chain = [layout]
    for axis in reversed(range(len(layout))):
        if layout[axis].kind in (Kind.SPLIT, Kind.PARTIAL):
            chain.append((*chain[-1][:axis], R, *chain[-1][axis + 1 :]))
    return chain


def gather_full(value: Tensor, layout: Layout, groups: DeviceGroups) -> Tensor:
    """The whole tensor on every rank, without a gradient; for checks and checkpoints."""
    return apply_chain(value, whole_chain(layout), groups, gradient=False)
