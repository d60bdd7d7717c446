"""Backward passes of a model's own: those that scale gradients are written out, others refused.

An export sees the forward pass f of an `autograd.Function`, and differentiates that. Its own
backward pass b is lost, so with a drawn gradient g of its results

    b(g) = g df/dx,  or  b(g) = c g with c = b(1)

has to hold on drawn inputs x, of usual sizes and of far smaller and larger ones, at which a bound
on gradients shows. In the first case nothing is lost. In the second (straight-through estimators,
reversed and scaled gradients) the function is exported as

    detach(f(x)) + (c x - detach(c x))

All else would train with other gradients, without a word.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ModelError

_TORCHS = "torch."
"""The functions of torch itself (checkpoint's is one) only recompute what autograd would keep."""
_SIDE = 8
"""Longest dim of a drawn input: dims that are equal stay so, and no input is large."""
_SCALES = (1.0, 1e-8, 1e8)
"""Sizes of drawn inputs, and of drawn gradients: code that bounds either does so in between."""
_CLOSE = 1e-6
"""Relative difference of gradients in float64, as constants are written with eight digits."""


@contextmanager
def none_of_its_own(module: torch.nn.Module, *, train: bool) -> Iterator[None]:
    """Refuse a module whose backward pass has code of its own, found while it is exported.

    Without `train` there is no backward pass, and nothing is refused.
    """
    if not train:
        yield
        return
    _require_no_hooks(module)
    refused: list[str] = []
    apply = torch.autograd.Function.__dict__["apply"]

    def replaced(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        own = apply.__get__(None, kind)
        if kind.__module__.startswith(_TORCHS):
            return own(*args, **kwargs)
        call = _Call(kind=kind, own=own, args=args)
        # A thread of its own is under none of the modes of an export.
        with ThreadPoolExecutor(1) as apart:
            derived = apart.submit(call.is_like, call.forward).result()
            scales = not derived and apart.submit(call.is_like, call.scaled).result()
        if scales:
            return call.scaled(*args)
        if not derived:
            refused.append(kind.__qualname__)
        return own(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(replaced)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
    if refused:
        raise ModelError(
            f"{refused[0]} is an autograd.Function with a backward pass of its own, which a "
            "planned program would not have: write it with operators that torch differentiates "
            "(x.detach() and torch.where do what most need), or plan without training"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """A call of an `autograd.Function`, of whose tensors the shapes and types are read."""

    kind: type[torch.autograd.Function]
    own: Callable[..., Any]
    args: Sequence[Any]

    def is_like(self, other: Callable[..., Any]) -> bool:
        """Whether the own backward pass gives what torch derives from another forward pass."""
        try:
            sizes = itertools.product(_SCALES, repeat=2)
            return all(self._agree(other, *pair) for pair in sizes)
        except Exception:  # a model's code may raise anything
            return False

    def _agree(self, other: Callable[..., Any], size: float, above: float) -> bool:
        """Whether both agree on inputs of one size, and on gradients of results of another."""
        draw = torch.Generator().manual_seed(0)
        args = [_drawn(value, size, draw) for value in self.args]
        given = [value for value in args if isinstance(value, Tensor) and value.requires_grad]
        own = _gradients(self.own, args, given, above)
        derived = _gradients(other, args, given, above)
        return all(
            torch.allclose(mine, torchs, rtol=_CLOSE, atol=_CLOSE * float(torchs.abs().max()))
            for mine, torchs in zip(own, derived, strict=True)
        )

    def forward(self, *args: Any) -> Any:
        """The forward pass, for torch to differentiate."""
        return self._made(_Context(), *args)

    def scaled(self, *args: Any) -> Tensor:
        """The forward pass, with a backward pass that scales as the own one does."""
        context = _Context()
        still = [value.detach() if isinstance(value, Tensor) else value for value in args]
        made: Tensor = self._made(context, *still)
        ones = torch.ones_like(made)
        scales = self.kind.backward(context, ones)
        result = made.detach()
        for value, scale in zip(
            args, scales if isinstance(scales, tuple) else (scales,), strict=True
        ):
            if isinstance(scale, Tensor):
                carried = value if scale is ones else value * scale
                result = result + (carried - carried.detach())
        return result

    def _made(self, context: _Context, *args: Any) -> Any:
        forward: Callable[..., Any] = self.kind.forward
        if self.kind.setup_context is torch.autograd.Function.setup_context:
            return forward(context, *args)
        made = forward(*args)
        self.kind.setup_context(context, args, made)
        return made


class _Context:
    """Takes the notes that a forward pass makes for its backward pass."""

    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *saved: Tensor) -> None:
        """Keep tensors."""
        self.saved_tensors = saved

    def mark_non_differentiable(self, *results: Tensor) -> None:
        """Their gradients are compared: zero on both sides if this is true."""

    def set_materialize_grads(self, value: bool) -> None:
        """All gradients are there."""


def _drawn(value: Any, size: float, draw: torch.Generator) -> Any:
    """A small tensor of drawn numbers in float64, or of zeros where it counts or chooses."""
    if not isinstance(value, Tensor):
        return value
    shape = [min(int(side), _SIDE) for side in value.shape]
    if not value.is_floating_point():
        return torch.zeros(shape, dtype=value.dtype)
    return torch.randn(shape, dtype=torch.float64, generator=draw).mul(size).requires_grad_()


def _gradients(
    function: Callable[..., Any], args: Sequence[Any], given: Sequence[Tensor], size: float
) -> list[Tensor]:
    """Gradients of the `given` ones among `args`, of drawn gradients of all results."""
    with torch.enable_grad():
        made = function(*args)
        results = [
            result
            for result in (made if isinstance(made, tuple) else (made,))
            if isinstance(result, Tensor) and result.requires_grad
        ]
        draw = torch.Generator().manual_seed(1)
        above = [torch.randn(r.shape, dtype=r.dtype, generator=draw) * size for r in results]
        return list(torch.autograd.grad(results, given, above, materialize_grads=True))


def _require_no_hooks(module: torch.nn.Module) -> None:
    """Refuse hooks on the gradients of submodules."""
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise ModelError(
                f"{path or 'the module'} has a backward hook, which would never run in a planned "
                "program: remove it (the handle's remove()), or put hooks on parameters, which the "
                "planned ones take over"
            )
