"""The collectives that move a tensor between splits.

They are torch's functional ones, so that a compiled graph can hold them: `begin_...` issues a
collective, `arrived` waits where the value is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

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


class _Parcels(torch.autograd.Function):
    """An exchange of rows as bytes: several values of a row in one message.

    Backward, the gradients of those that want one go back in one message.
    """

    @staticmethod
    def forward(
        ctx: Any, outgoing: list[int], incoming: list[int], group: AxisGroup, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.way = outgoing, incoming, group
        arrivals = _parcels(values, outgoing, incoming, group)
        ctx.mark_non_differentiable(*(v for v in arrivals if not v.is_floating_point()))
        return tuple(arrivals)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        outgoing, incoming, group = ctx.way
        wanted = ctx.needs_input_grad[3:]
        back = _parcels(
            [g for g, need in zip(gradients, wanted, strict=True) if need],
            incoming,
            outgoing,
            group,
        )
        homes = iter(back)
        return (None, None, None, *(next(homes) if need else None for need in wanted))


def _parcels(
    values: Sequence[Tensor], outgoing: Sequence[int], incoming: Sequence[int], group: AxisGroup
) -> list[Tensor]:
    """Rows of all `values` [rows, columns] in one exchange."""
    as_bytes = [value.contiguous().view(torch.uint8) for value in values]
    widths = [piece.shape[1] for piece in as_bytes]
    come = arrived(_uneven(torch.cat(as_bytes, 1), outgoing, incoming, group, "rows"))
    pieces = come.split_with_sizes(widths, 1)
    return [
        piece.contiguous().view(value.dtype) for piece, value in zip(pieces, values, strict=True)
    ]


def exchange_parcels(
    values: Sequence[Tensor], outgoing: Sequence[int], incoming: Sequence[int], group: AxisGroup
) -> tuple[Tensor, ...]:
    """As `exchange_rows`, of several values [rows, columns] at once."""
    out: tuple[Tensor, ...] = _Parcels.apply(  # type: ignore[no-untyped-call]
        list(outgoing), list(incoming), group, *values
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
