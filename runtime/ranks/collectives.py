"""The collectives that move a tensor between splits.

They are torch's functional ones, so that a compiled graph can hold them: `begin_...` issues a
collective, `arrived` waits where the value is used.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .current_action import exchanging
from .cuts import deal, join
from .device_groups import AxisGroup

_C10D = torch.ops._c10d_functional

# Dtypes that both Gloo and NCCL can move; the others (bool for NCCL, int16, fp8, complex) travel as
# bytes.
MOVABLE = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.int8,
        torch.uint8,
    }
)


def in_movable_type(value: Tensor) -> Tensor:
    """A contiguous tensor in a type that every backend carries: itself, or its bytes."""
    return value if value.dtype in MOVABLE else value.view(-1).view(torch.uint8)


def arrived(coming: Tensor) -> Tensor:
    """Wait for a collective that has begun, and return its result."""
    out: Tensor = _C10D.wait_tensor(coming)
    return out


def _moved(value: Tensor, move: Callable[[Tensor], Tensor]) -> Tensor:
    """Run a collective that only moves elements.

    Types that backends cannot carry go as bytes, and are waited for at once: the result must be
    viewed in its own type before anyone sees it.
    """
    if value.dtype in MOVABLE:
        return move(value.contiguous())
    # The first dim stays, since an all-to-all counts its rows.
    as_bytes = value.contiguous().view(-1).view(torch.uint8).view(value.shape[0], -1)
    return arrived(move(as_bytes)).view(-1).view(value.dtype)


def begin_all_reduce(value: Tensor, group: AxisGroup, reduction: str = "sum") -> Tensor:
    """The sum (maximum, minimum) over the group, on its way."""
    out: Tensor = _C10D.all_reduce(value.contiguous(), reduction, group.name)
    return out


def begin_gather(rows: Tensor, size: int, name: str) -> Tensor:
    """Begin to gather the rows of the `size` ranks of a group, one rank's behind the other's.

    The result is allocated here. Where torch allocates it, Gloo's worker threads write the long
    name of that collective to one string at the same time, which corrupts the heap (torch 2.13).
    """
    out = rows.new_empty((size * rows.shape[0], *rows.shape[1:]))
    _C10D.all_gather_into_tensor_out(rows, size, name, out=out)
    return out


def begin_all_gather(value: Tensor, group: AxisGroup) -> Tensor:
    """Begin to gather the shards of the group, one behind the other."""
    flat = value.contiguous().view(1, *value.shape)
    return _moved(flat, lambda x: begin_gather(x, group.size, group.name))


def begin_reduce_scatter(value: Tensor, dim: int, parts: int, group: AxisGroup) -> Tensor:
    """This rank's shard of the sum over the group, on its way."""
    out: Tensor = _C10D.reduce_scatter_tensor(
        deal(value, dim, parts, group.size), "sum", group.size, group.name
    )
    return out


def begin_all_to_all(value: Tensor, into_dim: int, into_parts: int, group: AxisGroup) -> Tensor:
    """This rank's piece of every shard of the group, on their way."""
    # Sizes count rows, of which `deal` makes one for every rank.
    each = [1] * group.size
    return _moved(
        deal(value, into_dim, into_parts, group.size),
        lambda x: _C10D.all_to_all_single(x, each, each, group.name),
    )


def swap_rows(rows: Tensor, group: AxisGroup) -> Tensor:
    """A row from each rank of the group, in place of the rows [ranks, ...] for each of them."""
    each = [1] * group.size
    return arrived(_moved(rows, lambda x: _C10D.all_to_all_single(x, each, each, group.name)))


def gather_rows(row: Tensor, group: AxisGroup) -> Tensor:
    """The rows of all ranks of the group, [ranks, ...]."""
    return arrived(begin_all_gather(row, group)).view(group.size, *row.shape)


def all_reduce(value: Tensor, group: AxisGroup, reduction: str = "sum") -> Tensor:
    """The sum (maximum, minimum) over the group."""
    return arrived(begin_all_reduce(value, group, reduction))


def all_gather(value: Tensor, dim: int, parts: int, group: AxisGroup) -> Tensor:
    """The whole `dim` from the group's shards of it."""
    return join(gather_rows(value, group), dim, parts)


def _uneven(
    value: Tensor, outgoing: Sequence[int], incoming: Sequence[int], group: AxisGroup, kind: str
) -> Tensor:
    """Begin to send rows of `value`: as many to (from) each rank as the lists say."""
    with exchanging(kind):
        out: Tensor = _C10D.all_to_all_single(
            value.contiguous(), list(incoming), list(outgoing), group.name
        )
    return out


def set_off(value: Tensor, group: AxisGroup, *, by: int = 1) -> Tensor:
    """Begin to send `value` to the rank `by` places after this one (cyclic).

    `arrived` waits for the value from the rank `by` places before.
    """
    flat = value.contiguous().view(-1)
    # An all-to-all in which each rank sends to one: a send and a receive in one collective cannot
    # wait for each other, as two messages in a ring can.
    outgoing = [0] * group.size
    incoming = [0] * group.size
    outgoing[(group.coordinate + by) % group.size] = flat.numel()
    incoming[(group.coordinate - by) % group.size] = flat.numel()
    return _uneven(flat, outgoing, incoming, group, "send")


def shift(value: Tensor, group: AxisGroup, *, by: int = 1) -> Tensor:
    """The value of the rank `by` places before this one (cyclic).

    It is priced as a send to the rank `by` places after.
    """
    # Gloo sends real numbers only.
    if value.is_complex():
        return torch.view_as_complex(shift(torch.view_as_real(value.resolve_conj()), group, by=by))
    return arrived(set_off(value, group, by=by)).view(value.shape)


class _Rows(torch.autograd.Function):
    """An exchange of rows, whose backward pass sends the rows' gradients back."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, outgoing: list[int], incoming: list[int], group: AxisGroup
    ) -> Tensor:
        ctx.outgoing = outgoing
        ctx.incoming = incoming
        ctx.group = group
        return arrived(_uneven(value, outgoing, incoming, group, "rows"))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back = arrived(_uneven(gradients[0], ctx.incoming, ctx.outgoing, ctx.group, "rows"))
        return back, None, None, None


class Way(NamedTuple):
    """The way of an exchange of rows: rows to and from each rank of a group.

    `widths`, `dtypes`: bytes and types of the values of a row. `wanted`: whether each one's
    gradient goes back.
    """

    outgoing: Sequence[int]
    incoming: Sequence[int]
    group: AxisGroup
    widths: Sequence[int]
    dtypes: Sequence[torch.dtype]
    wanted: Sequence[bool]

    def sent(self, values: Sequence[Tensor]) -> Tensor:
        """Begin to send the values, as bytes in one message."""
        return _uneven(_in_bytes(values), self.outgoing, self.incoming, self.group, "rows")

    def returned(self, gradients: Sequence[Tensor]) -> Tensor:
        """Begin to send those gradients back that are wanted."""
        some = list(itertools.compress(gradients, self.wanted))
        return _uneven(_in_bytes(some), self.incoming, self.outgoing, self.group, "rows")

    def values(self, come: Tensor) -> list[Tensor]:
        """The values in a message that has come."""
        return _in_types(come, self.widths, self.dtypes)

    def gradients(self, come: Tensor) -> list[Tensor | None]:
        """The gradients in a message that has come, None for those that are not wanted."""
        widths = list(itertools.compress(self.widths, self.wanted))
        homes = iter(_in_types(come, widths, list(itertools.compress(self.dtypes, self.wanted))))
        return [next(homes) if wanted else None for wanted in self.wanted]


class Sent(NamedTuple):
    """Rows under way, as bytes."""

    coming: Tensor
    way: Way


def _in_bytes(values: Sequence[Tensor]) -> Tensor:
    """Rows of all `values` [rows, columns] as one tensor of bytes."""
    as_bytes = [value.contiguous().view(torch.uint8) for value in values]
    # A single value needs no copy.
    return as_bytes[0] if len(as_bytes) == 1 else torch.cat(as_bytes, 1)


def _in_types(rows: Tensor, widths: Sequence[int], dtypes: Sequence[torch.dtype]) -> list[Tensor]:
    pieces = rows.split_with_sizes(list(widths), 1)
    return [piece.contiguous().view(dtype) for piece, dtype in zip(pieces, dtypes, strict=True)]


class _ParcelsLeave(torch.autograd.Function):
    """Begin an exchange of rows; backward, wait for the gradients that come back."""

    @staticmethod
    def forward(ctx: Any, way: Way, *values: Tensor) -> tuple[Tensor, Tensor]:
        ctx.way = way
        size = sum(itertools.compress(way.widths, way.wanted))
        # One element has the shape of the message back, in the smallest type with a gradient.
        tag = values[0].new_empty((), dtype=_TAG)
        coming = way.sent(values)
        # The gradient flows through the stand-in alone.
        ctx.mark_non_differentiable(coming)
        return tag.expand(values[0].shape[0], size // _TAG.itemsize), coming

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *ctx.way.gradients(arrived(gradients[0]).view(torch.uint8)))


class _ParcelsArrive(torch.autograd.Function):
    """Wait for the rows of an exchange; backward, begin to send their gradients back."""

    @staticmethod
    def forward(ctx: Any, way: Way, tag: Tensor, coming: Tensor) -> tuple[Tensor, ...]:
        ctx.way = way
        values = way.values(arrived(coming))
        still = [v for v, wanted in zip(values, way.wanted, strict=True) if not wanted]
        ctx.mark_non_differentiable(*still)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        coming = ctx.way.returned(gradients)
        # Anomaly mode reads the gradient before it has come.
        if not torch.compiler.is_compiling() and torch.is_anomaly_enabled():
            coming = arrived(coming)
        return None, coming.view(_TAG), None


_TAG = torch.float16


def parcels_leave(
    values: Sequence[Tensor], outgoing: Sequence[int], incoming: Sequence[int], group: AxisGroup
) -> tuple[Tensor, Sent]:
    """Begin an exchange of rows of several values [rows, columns]; `parcels_arrive` ends it.

    The first result stands for the rows in autograd's graph: its gradient is the message on its
    way back. The numbers of rows depend on data.
    """
    way = Way(
        list(outgoing),
        list(incoming),
        group,
        [value.shape[1] * value.element_size() for value in values],
        [value.dtype for value in values],
        [torch.is_grad_enabled() and value.requires_grad for value in values],
    )
    tag, coming = _ParcelsLeave.apply(way, *values)  # type: ignore[no-untyped-call]
    return tag, Sent(coming, way)


def parcels_arrive(tag: Tensor, sent: Sent) -> tuple[Tensor, ...]:
    """The values whose exchange `parcels_leave` began; backward, their gradients set off here."""
    out: tuple[Tensor, ...] = _ParcelsArrive.apply(  # type: ignore[no-untyped-call]
        sent.way, tag, sent.coming
    )
    return out


def exchange_rows(
    value: Tensor, outgoing: Sequence[int], incoming: Sequence[int], group: AxisGroup
) -> Tensor:
    """An all-to-all of whole rows whose numbers depend on data."""
    out: Tensor = _Rows.apply(  # type: ignore[no-untyped-call]
        value, list(outgoing), list(incoming), group
    )
    return out
