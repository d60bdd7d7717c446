"""Exchanges of whole values between the ranks of two placements, with their gradients.

A rank that holds nothing of a tensor has a stand-in: an empty tensor that keeps its place in
autograd. So the backward pass reaches every exchange of the rank, in the same order everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.runtime.ranks.collectives import in_movable_type
from autopar.runtime.ranks.process_groups import message_group


def exchange(
    value: Tensor | None, source: Sequence[int], target: Sequence[int], like: Tensor
) -> Tensor | None:
    """Bring a value from the ranks of `source` to those of `target` (None on others).

    `like`: an empty example.
    """
    me = own_rank()
    lacking = [rank for rank in target if rank not in source]
    received = value if me in target and me in source else None
    # The messages are in one order everywhere, so that no two ranks wait for each other.
    for number, taker in enumerate(lacking):
        giver = source[number % len(source)]
        if me not in (giver, taker):
            continue
        group = message_group(giver, taker)
        if me == giver:
            assert value is not None
            dist.send(in_movable_type(value.contiguous()), dst=taker, group=group)
        else:
            received = torch.empty_like(like)
            dist.recv(in_movable_type(received), src=giver, group=group)
    return received


def own_rank() -> int:
    """The number of this rank; 0 where there are no others."""
    return dist.get_rank() if dist.is_initialized() else 0


class Hand(torch.autograd.Function):
    """A whole value to other ranks; its gradient, which every taker has whole, comes back."""

    @staticmethod
    def forward(
        ctx: Any,
        value: Tensor,
        source: tuple[int, ...],
        target: tuple[int, ...],
        shape: tuple[int, ...],
        device: torch.device,
    ) -> Tensor:
        ctx.source = source
        ctx.target = target
        ctx.shape = shape
        ctx.own_shape = value.shape
        me = own_rank()
        like = torch.empty(shape, dtype=value.dtype, device=device)
        received = exchange(value.detach() if me in source else None, source, target, like)
        ctx.device = value.device
        if received is None:
            return value.new_empty(0, device=device)
        # Autograd takes an input that is returned as it is for one that was changed in place.
        return received.view_as(received) if received is value else received

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        me = own_rank()
        like = torch.empty(ctx.shape, dtype=gradients[0].dtype, device=ctx.device)
        gradient = exchange(
            gradients[0] if me in ctx.target else None, ctx.target, ctx.source, like
        )
        if gradient is None:
            gradient = torch.zeros(ctx.own_shape, dtype=gradients[0].dtype, device=ctx.device)
        return gradient, None, None, None, None


class StandIn(torch.autograd.Function):
    """The result of an operator on ranks that hold nothing of it."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, device: torch.device, *inputs: Tensor) -> Tensor:
        ctx.shapes = [(value.shape, value.dtype, value.device) for value in inputs]
        return torch.empty(0, dtype=dtype, device=device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        zeros = [
            torch.zeros(shape, dtype=dtype, device=device) if dtype.is_floating_point else None
            for shape, dtype, device in ctx.shapes
        ]
        return (None, None, *zeros)


def stand_in(dtype: torch.dtype, device: torch.device, inputs: Sequence[Tensor]) -> Tensor:
    """An empty tensor behind `inputs`, on the device that other ranks have the result on.

    Autograd has a thread for each device, and the exchanges of a backward pass must be in the order
    of one thread.
    """
    out: Tensor = StandIn.apply(dtype, device, *inputs)  # type: ignore[no-untyped-call]
    return out if dtype.is_floating_point or dtype.is_complex else out.detach()
