"""Several tensors along one chain of actions: each step communicates them in one flat message.

A tensor to gather, scatter or exchange is viewed as [degree, elements]; joined along the elements,
one collective moves all tensors. Steps without communication run tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from autopar.runtime.ranks.collectives import MOVABLE, begin_gather
from autopar.runtime.ranks.cuts import deal, join, write_joined
from autopar.runtime.ranks.device_groups import AxisGroup

from .steps import ON_ONE_DEVICE, Move, act

_C10D = torch.ops._c10d_functional

Carried = Generator[Tensor, Tensor, list[Tensor]]
"""A generator that yields collectives under way, receives their results, and returns the tensors at
the end of the chain.
"""

Begun = tuple[Tensor, Callable[[Tensor], list[Tensor]]]
"""A collective under way, and the function that makes tensors of its result."""
Rooms = Callable[[], Sequence[Tensor]]
"""Makes the tensors to which the results of a chain's last step are written."""


def carry(
    values: Sequence[Tensor],
    steps: Sequence[tuple[Sequence[Move], AxisGroup]],
    rooms: Rooms | None = None,
) -> Carried:
    """Take `values` through steps, each with an action for every value and a group.

    `rooms`: where the last step's results are written (None: to new memory).
    """
    present = list(values)
    # The generator must not keep the first values alive while it waits.
    values = ()
    for number, (actions, group) in enumerate(steps):
        last = rooms if number == len(steps) - 1 else None
        if actions[0].name in ON_ONE_DEVICE or group.size == 1:
            pairs = zip(present, actions, strict=True)
            present = [act(value, action, group) for value, action in pairs]
        else:
            begun, finish = _BEGIN[actions[0].name](present, actions, group, last)
            # The inputs may go while their sum is under way.
            present = []
            present = finish((yield begun))
            # An all-gather writes its results where they shall lie.
            if last is not None and actions[0].name == "all_gather":
                return present
    if rooms is None:
        return present
    targets = list(rooms())
    for target, value in zip(targets, present, strict=True):
        target.copy_(value)
    return targets


class Moving:
    """A chain under way, whose first collective is issued at once.

    Each further one is issued when the chain is asked to go on, so that the order of collectives is
    decided by the caller and is the same on all ranks.
    """

    def __init__(self, carried: Generator[Tensor, Tensor, object]) -> None:
        self._carried = carried
        self._begun: Tensor | None = None
        self._send(None)

    def _send(self, arrived: Tensor | None) -> None:
        try:
            with torch.no_grad():
                if arrived is None:
                    self._begun = next(self._carried)
                else:
                    self._begun = self._carried.send(arrived)
        except StopIteration:
            self._begun = None

    def go_on(self) -> None:
        """Wait for the collective under way and issue the next one, if there is another."""
        if self._begun is not None:
            self._send(_C10D.wait_tensor(self._begun))

    def finish(self) -> None:
        """Wait for all collectives of the chain."""
        while self._begun is not None:
            self.go_on()


def flat_rows(values: Sequence[Tensor]) -> Tensor:
    """Join tensors of [degree, ...] to one of [degree, elements]."""
    rows = [value.reshape(value.shape[0], -1) for value in values]
    return torch.cat(rows, 1) if len(rows) > 1 else rows[0]


def _moved(
    flat: Tensor, move: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Run a collective that only moves elements; types that backends cannot carry go as bytes."""
    if flat.dtype in MOVABLE:
        return move(flat.contiguous()), lambda out: out
    return move(flat.contiguous().view(torch.uint8)), lambda out: out.view(flat.dtype)


def _all_gather(
    values: Sequence[Tensor], actions: Sequence[Move], group: AxisGroup, rooms: Rooms | None
) -> Begun:
    shapes = [value.shape for value in values]
    flat = torch.cat([value.reshape(-1) for value in values]).unsqueeze(0)
    begun, seen = _moved(flat, lambda x: begin_gather(x, group.size, group.name))

    def finish(out: Tensor) -> list[Tensor]:
        rows = seen(out).view(group.size, -1)
        sizes = [shape.numel() for shape in shapes]
        pieces = rows.split(sizes, 1)  # type: ignore[no-untyped-call]
        each = [
            piece.unflatten(1, shape) if shape else piece.squeeze(1)
            for piece, shape in zip(pieces, shapes, strict=True)
        ]
        if rooms is None:
            pairs = zip(each, actions, strict=True)
            return [join(piece, action.dim, action.parts) for piece, action in pairs]
        # Written where the values shall lie, without another copy of them all.
        targets = list(rooms())
        for target, piece, action in zip(targets, each, actions, strict=True):
            write_joined(target, piece, action.dim, action.parts)
        return targets

    return begun, finish


def _reduce_scatter(
    values: Sequence[Tensor], actions: Sequence[Move], group: AxisGroup, _: Rooms | None
) -> Begun:
    dealt = [
        deal(value, action.dim, action.parts, group.size)
        for value, action in zip(values, actions, strict=True)
    ]
    begun = _C10D.reduce_scatter_tensor(flat_rows(dealt), "sum", group.size, group.name)
    shapes = [pieces.shape[1:] for pieces in dealt]
    return begun, lambda out: _cut(out.view(-1), shapes)


def _all_reduce(
    values: Sequence[Tensor], actions: Sequence[Move], group: AxisGroup, _: Rooms | None
) -> Begun:
    shapes = [value.shape for value in values]
    flat = torch.cat([value.reshape(-1) for value in values])
    # In place: the flat tensor is ours alone.
    return _C10D.all_reduce_(flat, actions[0].reduction, group.name), lambda out: _cut(out, shapes)


def _all_to_all(
    values: Sequence[Tensor], actions: Sequence[Move], group: AxisGroup, _: Rooms | None
) -> Begun:
    dealt = [
        deal(value, action.into_dim, action.into_parts, group.size)
        for value, action in zip(values, actions, strict=True)
    ]
    shapes = [pieces.shape for pieces in dealt]
    each = [1] * group.size
    begun, seen = _moved(
        flat_rows(dealt), lambda x: _C10D.all_to_all_single(x, each, each, group.name)
    )

    def finish(out: Tensor) -> list[Tensor]:
        sizes = [shape[1:].numel() for shape in shapes]
        rows = seen(out).view(group.size, -1).split(sizes, 1)  # type: ignore[no-untyped-call]
        return [
            join(row.reshape(shape), a.dim, a.parts)
            for row, shape, a in zip(rows, shapes, actions, strict=True)
        ]

    return begun, finish


def _cut(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of a flat tensor in these shapes."""
    pieces = flat.split([shape.numel() for shape in shapes])  # type: ignore[no-untyped-call]
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


_BEGIN = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
}
