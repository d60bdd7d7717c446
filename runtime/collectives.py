"""The process groups of a mesh, this rank's shards, and the collectives that move a tensor between splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.errors import PlanError
from autopar.sharding.layout import Kind, Layout, Placement, R, local_parts
from autopar.sharding.mesh import Axes, Mesh, axis_sets

from .current_action import exchanging
from .groups import group_of

_C10D = torch.ops._c10d_functional

# Dtypes that both Gloo and NCCL can move; the others (bool for NCCL, int16, fp8, complex) travel as bytes.
MOVABLE = frozenset({torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8})


class AxisGroup(NamedTuple):
    """This rank's process group over one mesh axis or several, in plain values so that a compiled graph can hold it."""

    name: str
    size: int
    coordinate: int


class Cut(NamedTuple):
    """One level of a split: `dim` is `parts` equal parts, each cut in `degree` shards of which `coordinate` is ours."""

    dim: int
    parts: int
    degree: int
    coordinate: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGroups:
    """A mesh with this rank's place and the process groups of its axes; its devices are the ranks from `first` on.

    `joint`: the groups over several axes; a rank's coordinate there is its place in row-major order.
    """

    mesh: Mesh
    rank: int
    coordinate: tuple[int, ...]
    axes: tuple[AxisGroup, ...]
    process_groups: tuple[dist.ProcessGroup | None, ...]
    first: int = 0
    joint: Mapping[Axes, AxisGroup] = field(default_factory=dict)

    def over(self, axes: Axes) -> AxisGroup:
        """The group over one axis or several."""
        return self.axes[axes[0]] if len(axes) == 1 else self.joint[axes]

    @classmethod
    def create(cls, mesh: Mesh) -> DeviceGroups:
        """The mesh of all ranks. A mesh of one device needs no process group."""
        world = dist.get_world_size() if dist.is_initialized() else 1
        if world != mesh.devices:
            raise PlanError(f"the plan is for {mesh.devices} devices ({mesh}), but {world} ranks are running")
        return cls.of_ranks(mesh, 0)

    @classmethod
    def of_ranks(cls, mesh: Mesh, first: int) -> DeviceGroups:
        """The mesh of the ranks from `first` on, including this one; each of them must call this at the same point."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        groups: dict[Axes, dist.ProcessGroup | None] = {}
        found: dict[Axes, AxisGroup] = {}
        for axes in axis_sets(mesh.shape):
            members = next(g for g in mesh.groups(axes) if rank - first in g)
            own = groups[axes] = group_of([first + r for r in members]) if len(members) > 1 else None
            found[axes] = AxisGroup(str(own.group_name) if own is not None else "", len(members), members.index(rank - first))
        alone = [axes for axes in found if len(axes) == 1]
        return cls(
            mesh=mesh, rank=rank, coordinate=mesh.coordinate(rank - first), axes=tuple(found[axes] for axes in alone),
            process_groups=tuple(groups[axes] for axes in alone), first=first,
            joint={axes: group for axes, group in found.items() if len(axes) > 1},
        )  # fmt: skip

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
        value = take(value, cut.dim, cut.parts, cut.degree, cut.coordinate)
    return value


def _levels(value: Tensor, dim: int, parts: int, degree: int) -> Tensor:
    """View `dim` as [parts, degree, chunk]."""
    shape = value.shape
    return value.reshape(*shape[:dim], parts, degree, shape[dim] // (parts * degree), *shape[dim + 1 :])


def take(value: Tensor, dim: int, parts: int, degree: int, coordinate: int) -> Tensor:
    return _levels(value, dim, parts, degree).select(dim + 1, coordinate).flatten(dim, dim + 1)


def pad(value: Tensor, dim: int, parts: int, degree: int, coordinate: int) -> Tensor:
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
    """As `join`, into existing memory."""
    degree, shard = pieces.shape[0], pieces.shape[1:]
    chunks = pieces.reshape(degree, *shard[:dim], parts, shard[dim] // parts, *shard[dim + 1 :])
    _levels(target, dim, parts, degree).movedim(dim + 1, 0).copy_(chunks)


def deal(value: Tensor, dim: int, parts: int, degree: int) -> Tensor:
    """The reverse of `join`: [degree, *shard], contiguous."""
    return _levels(value, dim, parts, degree).movedim(dim + 1, 0).flatten(dim + 1, dim + 2).contiguous()


def arrived(coming: Tensor) -> Tensor:
    """Wait for a collective that has begun, and return its result."""
    out: Tensor = _C10D.wait_tensor(coming)
    return out


def _moved(value: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a collective that only moves elements; types that backends cannot carry go as bytes, and are waited for."""
    if value.dtype in MOVABLE:
        return move(value.contiguous())
    return arrived(move(value.contiguous().view(-1).view(torch.uint8).view(value.shape[0], -1))).view(-1).view(value.dtype)


def begin_all_reduce(value: Tensor, group: AxisGroup, reduction: str = "sum") -> Tensor:
    """The sum (maximum, minimum) over the group, on its way."""
    out: Tensor = _C10D.all_reduce(value.contiguous(), reduction, group.name)
    return out


def begin_all_gather(value: Tensor, group: AxisGroup) -> Tensor:
    """Begin to gather the shards of the group, one behind the other."""
    flat = value.contiguous().view(1, *value.shape)
    return _moved(flat, lambda x: _C10D.all_gather_into_tensor(x, group.size, group.name))


def begin_reduce_scatter(value: Tensor, dim: int, parts: int, group: AxisGroup) -> Tensor:
    """This rank's shard of the sum over the group, on its way."""
    out: Tensor = _C10D.reduce_scatter_tensor(deal(value, dim, parts, group.size), "sum", group.size, group.name)
    return out


def begin_all_to_all(value: Tensor, into_dim: int, into_parts: int, group: AxisGroup) -> Tensor:
    """This rank's piece of every shard of the group, on their way."""
    each = [1] * group.size
    return _moved(deal(value, into_dim, into_parts, group.size), lambda x: _C10D.all_to_all_single(x, each, each, group.name))


def all_reduce(value: Tensor, group: AxisGroup, reduction: str = "sum") -> Tensor:
    """The sum (maximum, minimum) over the group."""
    return arrived(begin_all_reduce(value, group, reduction))


def all_gather(value: Tensor, dim: int, parts: int, group: AxisGroup) -> Tensor:
    """The whole `dim` from the group's shards of it."""
    return join(arrived(begin_all_gather(value, group)).view(group.size, *value.shape), dim, parts)


def _uneven(value: Tensor, outgoing: Sequence[int], incoming: Sequence[int], group: AxisGroup, kind: str) -> Tensor:
    """Rows of `value`, as many to (from) each rank as the lists say; to be waited for."""
    with exchanging(kind):
        out: Tensor = _C10D.all_to_all_single(value.contiguous(), list(incoming), list(outgoing), group.name)
    return out


def set_off(value: Tensor, group: AxisGroup, *, by: int = 1) -> Tensor:
    """Begin to send `value` to the rank `by` places after (cyclic); `arrived` waits for that from `by` before."""
    flat = value.contiguous().view(-1)
    outgoing, incoming = [0] * group.size, [0] * group.size
    outgoing[(group.coordinate + by) % group.size] = incoming[(group.coordinate - by) % group.size] = flat.numel()
    return _uneven(flat, outgoing, incoming, group, "send")


def shift(value: Tensor, group: AxisGroup, *, by: int = 1) -> Tensor:
    """The value of the rank `by` places before (cyclic); priced as a send to the rank `by` places after."""
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
