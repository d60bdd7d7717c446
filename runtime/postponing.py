"""Gradients of weights made later than those of inputs, so that other stages do not wait (zero-bubble pipelines).

A matrix product with a parameter has a graph of its own inside the node that autograd sees. The node's backward pass
asks that graph for the gradients of values; inside `later`, the part for weights stays until their turn. Each of the
two products of a backward pass is made once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .lowering.program import Place


class Postponed:
    """The products of one segment of one micro-batch; `later`: whether its backward pass leaves the weights."""

    def __init__(self) -> None:
        self.later = False
        self.left: list[Callable[[], list[tuple[Place, Tensor]]]] = []

    def make(self) -> Iterator[tuple[Place, Tensor]]:
        """Make the postponed gradients, with the places of their parameters."""
        left, self.left = self.left, []
        for one in left:
            yield from one()


class _Present(threading.local):
    segment: Postponed | None = None


_PRESENT = _Present()


@contextmanager
def of_segment(segment: Postponed | None) -> Iterator[None]:
    """Products inside belong to this segment."""
    before, _PRESENT.segment = _PRESENT.segment, segment
    try:
        yield
    finally:
        _PRESENT.segment = before


class _Product(torch.autograd.Function):
    """One operator on values and parameters, with an inner graph that gives the gradients of each in their turn."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], places: Sequence[Place | None], *tensors: Tensor) -> Tensor:
        ctx.segment, ctx.places = _PRESENT.segment, places
        ctx.leaves = [value.detach().requires_grad_(value.requires_grad) for value in tensors]
        with torch.enable_grad():
            ctx.out = run(*ctx.leaves)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        segment: Postponed | None = ctx.segment
        gradient, out, leaves, places = gradients[0], ctx.out, ctx.leaves, ctx.places
        later = segment is not None and segment.later
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad and not (later and places[i] is not None)]
        rest = [i for i, leaf in enumerate(leaves) if leaf.requires_grad and i not in wanted]
        keep = bool(rest) or torch._C._autograd._get_current_graph_task_keep_graph()
        found = torch.autograd.grad(out, [leaves[i] for i in wanted], gradient, retain_graph=keep) if wanted else ()
        if rest:
            assert segment is not None

            def weights() -> list[tuple[Place, Tensor]]:
                made = torch.autograd.grad(out, [leaves[i] for i in rest], gradient)
                return [(place, value) for i, value in zip(rest, made, strict=True) if (place := places[i]) is not None]

            segment.left.append(weights)
        given = dict(zip(wanted, found, strict=True))
        return (None, None, *(given.get(i) for i in range(len(leaves))))


def product(function: Callable[..., Any], places: Mapping[str, Place]) -> Callable[..., Tensor]:
    """The operator with gradients of its parameters (the arguments in `places`) apart from those of its values."""

    def call(**arguments: Any) -> Tensor:
        names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        if not torch.is_grad_enabled() or not any(arguments[name].requires_grad for name in names):
            plain: Tensor = function(**arguments)
            return plain
        rest = {name: value for name, value in arguments.items() if name not in names}
        out: Tensor = _Product.apply(  # type: ignore[no-untyped-call]
            lambda *tensors: function(**rest, **dict(zip(names, tensors, strict=True))),
            [places.get(name) for name in names],
            *(arguments[name] for name in names),
        )
        return out

    call.__name__ = call.__qualname__ = getattr(function, "__name__", "product")
    return call
