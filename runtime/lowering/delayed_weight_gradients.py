"""Gradients of weights made later than those of inputs, so that other stages do not wait.

Zero-bubble pipelines are made of this (Qi et al., arXiv:2401.10241).

A matrix product with a parameter has a graph of its own inside the node that autograd sees. The
node's backward pass asks that graph for the gradients of values; inside `later`, the part for
weights stays until their turn. Each of the two products of a backward pass is made once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from .program import Place


class Postponed:
    """The products of one segment of one micro-batch.

    `later`: whether its backward pass leaves the gradients of weights.
    """

    def __init__(self) -> None:
        self.later = False
        self.left: list[Callable[[], list[tuple[Place, Tensor]]]] = []

    def make(self) -> Iterator[tuple[Place, Tensor]]:
        """Make the postponed gradients, with the places of their parameters."""
        postponed = self.left
        self.left = []
        for weights in postponed:
            yield from weights()


# Autograd runs backward passes on threads of its own, each in a segment of its own.
class _Present(threading.local):
    segment: Postponed | None = None


_PRESENT = _Present()


@contextmanager
def of_segment(segment: Postponed | None) -> Iterator[None]:
    """Products inside belong to this segment."""
    before = _PRESENT.segment
    _PRESENT.segment = segment
    try:
        yield
    finally:
        _PRESENT.segment = before


class _Product(torch.autograd.Function):
    """One operator on values and parameters, whose inner graph gives their gradients in turn."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Tensor], places: Sequence[Place | None], *tensors: Tensor
    ) -> Tensor:
        ctx.segment = _PRESENT.segment
        ctx.places = places
        # The inner graph ends at leaves of its own; autograd outside sees this node alone.
        ctx.leaves = [value.detach().requires_grad_(value.requires_grad) for value in tensors]
        with torch.enable_grad():
            ctx.out = run(*ctx.leaves)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        segment: Postponed | None = ctx.segment
        gradient = gradients[0]
        out = ctx.out
        leaves = ctx.leaves
        places = ctx.places
        later = segment is not None and segment.later
        wanted = [
            i
            for i, leaf in enumerate(leaves)
            if leaf.requires_grad and not (later and places[i] is not None)
        ]
        rest = [i for i, leaf in enumerate(leaves) if leaf.requires_grad and i not in wanted]
        # The inner graph is needed once more, for the weights or for another backward pass.
        keep = bool(rest) or torch._C._autograd._get_current_graph_task_keep_graph()
        results: tuple[Tensor, ...] = ()
        if wanted:
            inputs = [leaves[i] for i in wanted]
            results = torch.autograd.grad(out, inputs, gradient, retain_graph=keep)
        if rest:
            assert segment is not None

            def weights() -> list[tuple[Place, Tensor]]:
                of_weights = torch.autograd.grad(out, [leaves[i] for i in rest], gradient)
                pairs = zip((places[i] for i in rest), of_weights, strict=True)
                return [(place, value) for place, value in pairs if place is not None]

            segment.left.append(weights)
        by_leaf = dict(zip(wanted, results, strict=True))
        return (None, None, *(by_leaf.get(i) for i in range(len(leaves))))


def product(function: Callable[..., Any], places: Mapping[str, Place]) -> Callable[..., Tensor]:
    """The operator, the gradients of its parameters apart from those of its values.

    `places`: the arguments that are parameters.
    """

    def call(**arguments: Any) -> Tensor:
        names = [name for name, value in arguments.items() if isinstance(value, Tensor)]
        # Where no gradient flows, an inner graph would only hold memory.
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

    # fx writes a graph's code with the names of the functions.
    call.__name__ = call.__qualname__ = getattr(function, "__name__", "product")
    return call
