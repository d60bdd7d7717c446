"""Redistribution on real ranks: process groups of a mesh, and every single-axis step as an autograd function.

A step between two kinds is a pair of actions, one on the value and one on the gradient:

    R → B   nothing / all_reduce        S → R   all_gather / take           P → R   all_reduce / nothing
    R → S   take / all_gather           S → B   all_gather / reduce_scatter P → S   reduce_scatter / all_gather
    B → R   nothing / keep              S → S'  all_to_all / all_to_all     P → B   all_reduce / all_reduce
    B → S   take / pad                  R → P   keep / nothing              B → P   keep / keep
                                        S → P   pad / take

`take` slices this rank's shard, `pad` surrounds it with zeros, `keep` leaves the value on coordinate 0 and zeros elsewhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import PlanError
from autopar.sharding.layout import Kind, Layout, Placement, R, local_parts
from autopar.sharding.mesh import Mesh
from autopar.sharding.redistribution import changed_axis

from .groups import group_of
from .present import exchanging

_C10D = torch.ops._c10d_functional

# Dtypes that both Gloo and NCCL can move; the others (bool for NCCL, int16, fp8, complex) travel as bytes.
MOVABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8})


class AxisGroup(NamedTuple):
    """This rank's process group on one mesh axis, in plain values so that a compiled graph can hold it."""

    name: str
    size: int
    coordinate: int


class Cut(NamedTuple):
    """One level of a split: `dim` is `parts` equal parts, each cut in `degree` shards of which `coordinate` is ours."""

    dim: int
    parts: int
    degree: int
    coordinate: int


class Action(NamedTuple):
    """What happens to a value (or a gradient): `dim` and `parts` are the split gathered or made, `into` that of an all-to-all."""

    name: str
    dim: int = -1
    parts: int = 1
    into_dim: int = -1
    into_parts: int = 1
    reduction: str = "sum"


Chain = tuple[tuple[Action, Action, AxisGroup], ...]
"""Single-axis steps: what happens to the value, what to its gradient, and in which group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroups:
    """A mesh with this rank's place in it and the process group of every axis; its devices are the ranks from `first` on."""

    mesh: Mesh
    rank: int
    coordinate: tuple[int, ...]
    axes: tuple[AxisGroup, ...]
    process_groups: tuple[dist.ProcessGroup | None, ...]
    first: int = 0

    @classmethod
    def create(cls, mesh: Mesh) -> DeviceGroups:
        """The mesh of all ranks. A mesh of one device needs no process group."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != mesh.devices:
            raise PlanError(f"the plan is for {mesh.devices} devices ({mesh}), but {world} ranks are running")
        return cls.of_ranks(mesh, 0)

    @classmethod
    def of_ranks(cls, mesh: Mesh, first: int) -> DeviceGroups:
        """The mesh of the ranks from `first` on, of which this is one; each of them must call this at the same point."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        coordinate = mesh.coordinate(rank - first)
        axes: list[AxisGroup] = []
        groups: list[dist.ProcessGroup | None] = []
        for axis, (size, position) in enumerate(zip(mesh.shape, coordinate, strict=True)):
            own = group_of([first + r for r in next(g for g in mesh.groups(axis) if rank - first in g)]) if size > 1 else None
            groups.append(own)
            axes.append(AxisGroup(str(own.group_name) if own is not None else "", size, position))
        return cls(mesh=mesh, rank=rank, coordinate=coordinate, axes=tuple(axes), process_groups=tuple(groups), first=first)

    @classmethod
    def single(cls) -> DeviceGroups:
        """One device, whether or not a process group runs."""
        return cls(mesh=Mesh(axes=()), rank=0, coordinate=(), axes=(), process_groups=())


def cuts_of(layout: Layout, mesh: Sequence[int], coordinate: Sequence[int]) -> tuple[Cut, ...]:
    """The slices that lead from the whole tensor to this rank's shard, to be taken in order."""
    done: list[Placement] = [R] * len(layout)
    cuts: list[Cut] = []
    for axis, placement in enumerate(layout):
        done[axis] = placement
        if placement.kind is Kind.SPLIT and mesh[axis] > 1:
            cuts.append(Cut(placement.dim, local_parts(tuple(done), axis, mesh), mesh[axis], coordinate[axis]))
    return tuple(cuts)


def shard_of(value: Tensor, cuts: Sequence[Cut]) -> Tensor:
    """This rank's shard of a whole tensor; a view where the layout of memory allows."""
    for cut in cuts:
        value = _take(value, cut.dim, cut.parts, cut.degree, cut.coordinate)
    return value


def _levels(value: Tensor, dim: int, parts: int, degree: int) -> Tensor:
    """View `dim` as [parts, degree, chunk]."""
    shape = value.shape
    return value.reshape(*shape[:dim], parts, degree, shape[dim] // (parts * degree), *shape[dim + 1 :])


def _take(value: Tensor, dim: int, parts: int, degree: int, coordinate: int) -> Tensor:
    return _levels(value, dim, parts, degree).select(dim + 1, coordinate).flatten(dim, dim + 1)


def _pad(value: Tensor, dim: int, parts: int, degree: int, coordinate: int) -> Tensor:
    shape = value.shape
    out = value.new_zeros(*shape[:dim], parts, degree, shape[dim] // parts, *shape[dim + 1 :])
    out.select(dim + 1, coordinate).copy_(_levels(value, dim, parts, 1).squeeze(dim + 1))
    return out.flatten(dim, dim + 2)


def join(pieces: Tensor, dim: int, parts: int) -> Tensor:
    """[degree, *shard] to the shard's dim gathered: each part takes its chunk of every piece."""
    shard = pieces.shape[1:]
    chunks = pieces.reshape(pieces.shape[0], *shard[:dim], parts, shard[dim] // parts, *shard[dim + 1 :])
    return chunks.movedim(0, dim + 1).flatten(dim, dim + 2)


def write_joined(target: Tensor, pieces: Tensor, dim: int, parts: int) -> None:
    """As `join`, into memory that is there."""
    degree, shard = pieces.shape[0], pieces.shape[1:]
    chunks = pieces.reshape(degree, *shard[:dim], parts, shard[dim] // parts, *shard[dim + 1 :])
    _levels(target, dim, parts, degree).movedim(dim + 1, 0).copy_(chunks)


def deal(value: Tensor, dim: int, parts: int, degree: int) -> Tensor:
    """The reverse of `join`: [degree, *shard], contiguous."""
    return _levels(value, dim, parts, degree).movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()


def _moved(value: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a collective that only moves elements; what the backends cannot carry goes as bytes."""
    if value.dtype in MOVABLE:
        out = move(value.contiguous())
    else:
        out = move(value.contiguous().view(-1).view(torch.uint8).view(value.shape[0], -1)).view(-1).view(value.dtype)
    waited: Tensor = _C10D.wait_tensor(out)
    return waited


def all_reduce(value: Tensor, group: AxisGroup, reduction: str = "sum") -> Tensor:
    """The sum (maximum, minimum) over the group."""
    out: Tensor = _C10D.wait_tensor(_C10D.all_reduce(value.contiguous(), reduction, group.name))
    return out


def all_gather(value: Tensor, dim: int, parts: int, group: AxisGroup) -> Tensor:
    """The whole `dim` from the group's shards of it."""
    flat = value.contiguous().view(1, *value.shape)
    pieces = _moved(flat, lambda x: _C10D.all_gather_into_tensor(x, group.size, group.name))
    return join(pieces.view(group.size, *value.shape), dim, parts)


def reduce_scatter(value: Tensor, dim: int, parts: int, group: AxisGroup) -> Tensor:
    """This rank's shard of the sum over the group."""
    pieces = deal(value, dim, parts, group.size)
    out: Tensor = _C10D.wait_tensor(_C10D.reduce_scatter_tensor(pieces, "sum", group.size, group.name))
    return out.view(pieces.shape[1:])


def all_to_all(value: Tensor, dim: int, parts: int, into_dim: int, into_parts: int, group: AxisGroup) -> Tensor:
    """From a split of `dim` to a split of `into_dim`."""
    pieces = deal(value, into_dim, into_parts, group.size)
    each = [1] * group.size
    pieces_shape = pieces.shape
    out = _moved(pieces, lambda x: _C10D.all_to_all_single(x, each, each, group.name))
    return join(out.view(pieces_shape), dim, parts)


def _uneven(value: Tensor, outgoing: Sequence[int], incoming: Sequence[int], group: AxisGroup, kind: str) -> Tensor:
    """Rows of `value`, as many to (from) each rank as the lists say; to be waited for."""
    with exchanging(kind):
        out: Tensor = _C10D.all_to_all_single(value.contiguous(), list(incoming), list(outgoing), group.name)
    return out


def set_off(value: Tensor, group: AxisGroup, *, by: int = 1) -> Tensor:
    """Send `value` to the rank `by` places after (cyclic); gives what `arrived` waits for: what comes from `by` places before, flat."""
    flat = value.contiguous().view(-1)
    outgoing, incoming = [0] * group.size, [0] * group.size
    outgoing[(group.coordinate + by) % group.size] = incoming[(group.coordinate - by) % group.size] = flat.numel()
    return _uneven(flat, outgoing, incoming, group, "send")


def arrived(coming: Tensor) -> Tensor:
    """What `set_off` gave, once it is there."""
    out: Tensor = _C10D.wait_tensor(coming)
    return out


def shift(value: Tensor, group: AxisGroup, *, by: int = 1) -> Tensor:
    """What the rank `by` places before holds (cyclic); a send to the rank `by` places after, priced as such."""
    if value.is_complex():  # Gloo sends real numbers only
        return torch.view_as_complex(shift(torch.view_as_real(value.resolve_conj()), group, by=by))
    return arrived(set_off(value, group, by=by)).view(value.shape)


class _Rows(torch.autograd.Function):
    """Rows to their owners, their gradients back."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, outgoing: list[int], incoming: list[int], group: AxisGroup) -> Tensor:
        ctx.outgoing, ctx.incoming, ctx.group = outgoing, incoming, group
        return arrived(_uneven(value, outgoing, incoming, group, "rows"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back = arrived(_uneven(gradients[0], ctx.incoming, ctx.outgoing, ctx.group, "rows"))
        return back, None, None, None


def exchange_rows(value: Tensor, outgoing: Sequence[int], incoming: Sequence[int], group: AxisGroup) -> Tensor:
    """An all-to-all of whole rows whose numbers depend on data."""
    out: Tensor = _Rows.apply(value, list(outgoing), list(incoming), group)  # type: ignore[no-untyped-call]
    return out


ON_ONE_DEVICE = frozenset(("nothing", "take", "pad", "keep"))
"""Actions that communicate nothing."""


def act(value: Tensor, action: Action, group: AxisGroup) -> Tensor:
    """Run one action; the result is contiguous."""
    match action.name:
        case "nothing":
            return value
        case "take":
            return _take(value, action.dim, action.parts, group.size, group.coordinate).contiguous()
        case "pad":
            return _pad(value, action.dim, action.parts, group.size, group.coordinate)
        case "keep":
            return value if group.coordinate == 0 else torch.zeros_like(value, memory_format=torch.contiguous_format)
    if group.size == 1:
        return value
    match action.name:
        case "all_reduce":
            return all_reduce(value, group, action.reduction)
        case "all_gather":
            return all_gather(value, action.dim, action.parts, group)
        case "reduce_scatter":
            return reduce_scatter(value, action.dim, action.parts, group)
        case "all_to_all":
            return all_to_all(value, action.dim, action.parts, action.into_dim, action.into_parts, group)
    raise AssertionError(action.name)


class _Step(torch.autograd.Function):
    """One action on the value, another on its gradient."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, ahead: Action, back: Action, group: AxisGroup) -> Tensor:
        ctx.back, ctx.group = back, group
        out = act(value, ahead, group)
        return out.view_as(out) if out is value else out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return act(gradients[0], ctx.back, ctx.group), None, None, None


def step(value: Tensor, ahead: Action, back: Action | None, group: AxisGroup) -> Tensor:
    """One single-axis step of a redistribution; `back` is None where no gradient flows."""
    if back is None or not value.requires_grad:
        return act(value.detach(), ahead, group)
    if ahead.reduction != "sum":
        raise PlanError(f"a partial {ahead.reduction} has no gradient")
    out: Tensor = _Step.apply(value, ahead, back, group)  # type: ignore[no-untyped-call]
    return out


def step_actions(before: Layout, after: Layout, axis: int, mesh: Sequence[int]) -> tuple[Action, Action]:
    """What a single-axis step does to the value and to the gradient."""
    split, whole, share, partial = Kind.SPLIT, Kind.REPLICATED, Kind.BROADCAST, Kind.PARTIAL
    kinds = before[axis].kind, after[axis].kind
    if (before[axis].reduction, after[axis].reduction) != ("sum", "sum") and after[axis].kind is not whole:
        raise PlanError(f"a partial {before[axis].reduction} can only be brought to R, not to {after[axis]}")
    nothing, keep = Action("nothing"), Action("keep")
    reduce = Action("all_reduce", reduction=before[axis].reduction)
    if kinds == (split, split):
        own, other = _dim(before, axis, mesh), _dim(after, axis, mesh)
        return Action("all_to_all", *own, *other), Action("all_to_all", *other, *own)
    dim, parts = _dim(before if before[axis].kind is split else after, axis, mesh)
    gather, scatter, take, pad = (Action(name, dim, parts) for name in ("all_gather", "reduce_scatter", "take", "pad"))
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
    return (layout[axis].dim, local_parts(layout, axis, mesh)) if layout[axis].kind is Kind.SPLIT else (-1, 1)


def apply_chain(value: Tensor, chain: Sequence[Layout], groups: DeviceGroups, *, gradient: bool) -> Tensor:
    """Bring a local value along a chain of layouts."""
    for before, after in itertools.pairwise(chain):
        axis = changed_axis(before, after)
        ahead, back = step_actions(before, after, axis, groups.mesh.shape)
        value = step(value, ahead, back if gradient else None, groups.axes[axis])
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
