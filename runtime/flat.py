"""Several tensors along one chain of actions, flat: each step communicates them in one message.

A tensor to gather, scatter or exchange is viewed as [degree, elements]; joined along the elements, one collective moves
all tensors. Steps without communication run tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from .collectives import MOVABLE, AxisGroup, deal, join, write_joined
from .current_action import PRESENT, at
from .redistribution import ON_ONE_DEVICE, Move, act

_C10D = torch.ops._c10d_functional

Carried = Generator[Tensor, Tensor, list[Tensor]]
"""Yields collectives under way, receives their results, and returns the tensors at the end of the chain."""

Begun = tuple[Tensor, Callable[[Tensor], list[Tensor]]]
"""A collective under way, and the function that makes tensors of its result."""
Into = Sequence[Tensor] | None


def carry(values: Sequence[Tensor], steps: Sequence[tuple[Sequence[Move], AxisGroup]], into: Sequence[Tensor] | None = None) -> Carried:
    """Take `values` through steps, each with an action for every value and a group.

    `into`: tensors to which the last step's results are written (None: new memory).
    """
    found, values = list(values), ()
    for number, (actions, group) in enumerate(steps):
        last = into if number == len(steps) - 1 else None
        if actions[0].name in ON_ONE_DEVICE or group.size == 1:
            found = [act(value, action, group) for value, action in zip(found, actions, strict=True)]
        else:
            begun, finish = _BEGIN[actions[0].name](found, actions, group, last)
            found = []  # the inputs may go while their sum is under way
            found = finish((yield begun))
    if into is not None:
        for target, value in zip(into, found, strict=True):
            if value is not target:  # an all-gather has written it there
                target.copy_(value)
        return list(into)
    return found


class Moving:
    """A chain under way: its first collective is issued at once, each further one when it is asked to go on."""

    def __init__(self, carried: Generator[Tensor, Tensor, object], collectives: int) -> None:
        self._carried, self.left = carried, collectives
        self._begun: Tensor | None = None
        self._action = PRESENT.action
        self._send(None)

    def _send(self, arrived: Tensor | None) -> None:
        try:
            with torch.no_grad(), at(self._action):
                self._begun = next(self._carried) if arrived is None else self._carried.send(arrived)
            self.left -= 1
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


def _rows(values: Sequence[Tensor]) -> Tensor:
    """[degree, elements] of all tensors of [degree, ...], joined."""
    rows = [value.reshape(value.shape[0], -1) for value in values]
    return torch.cat(rows, 1) if len(rows) > 1 else rows[0]


def _moved(flat: Tensor, move: Callable[[Tensor], Tensor]) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Run a collective that only moves elements; types that backends cannot carry go as bytes."""
    if flat.dtype in MOVABLE:
        return move(flat.contiguous()), lambda out: out
    return move(flat.contiguous().view(torch.uint8)), lambda out: out.view(flat.dtype)


def _all_gather(values: Sequence[Tensor], actions: Sequence[Move], group: AxisGroup, into: Into) -> Begun:
    shapes = [value.shape for value in values]
    flat = torch.cat([value.reshape(-1) for value in values]).unsqueeze(0)
    begun, seen = _moved(flat, lambda x: _C10D.all_gather_into_tensor(x, group.size, group.name))

    def finish(out: Tensor) -> list[Tensor]:
        pieces = seen(out).view(group.size, -1).split([shape.numel() for shape in shapes], 1)  # type: ignore[no-untyped-call]
        each = [piece.unflatten(1, shape) if shape else piece.squeeze(1) for piece, shape in zip(pieces, shapes, strict=True)]
        if into is None:
            return [join(piece, action.dim, action.parts) for piece, action in zip(each, actions, strict=True)]
        for target, piece, action in zip(into, each, actions, strict=True):
            write_joined(target, piece, action.dim, action.parts)
        return list(into)

    return begun, finish


def _reduce_scatter(values: Sequence[Tensor], actions: Sequence[Move], group: AxisGroup, _: Into) -> Begun:
    dealt = [deal(value, action.dim, action.parts, group.size) for value, action in zip(values, actions, strict=True)]
    begun = _C10D.reduce_scatter_tensor(_rows(dealt), "sum", group.size, group.name)
    shapes = [pieces.shape[1:] for pieces in dealt]
    return begun, lambda out: _cut(out.view(-1), shapes)


def _all_reduce(values: Sequence[Tensor], actions: Sequence[Move], group: AxisGroup, _: Into) -> Begun:
    shapes = [value.shape for value in values]
    flat = torch.cat([value.reshape(-1) for value in values])
    return _C10D.all_reduce_(flat, actions[0].reduction, group.name), lambda out: _cut(out, shapes)


def _all_to_all(values: Sequence[Tensor], actions: Sequence[Move], group: AxisGroup, _: Into) -> Begun:
    dealt = [deal(value, action.into_dim, action.into_parts, group.size) for value, action in zip(values, actions, strict=True)]
    shapes, each = [pieces.shape for pieces in dealt], [1] * group.size
    begun, seen = _moved(_rows(dealt), lambda x: _C10D.all_to_all_single(x, each, each, group.name))

    def finish(out: Tensor) -> list[Tensor]:
        rows = seen(out).view(group.size, -1).split([shape[1:].numel() for shape in shapes], 1)  # type: ignore[no-untyped-call]
        return [join(row.reshape(shape), a.dim, a.parts) for row, shape, a in zip(rows, shapes, actions, strict=True)]

    return begun, finish


def _cut(flat: Tensor, shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Views of a flat tensor in these shapes."""
    pieces = flat.split([shape.numel() for shape in shapes])  # type: ignore[no-untyped-call]
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


_BEGIN = {"all_gather": _all_gather, "reduce_scatter": _reduce_scatter, "all_reduce": _all_reduce, "all_to_all": _all_to_all}
