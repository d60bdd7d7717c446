"""Backward passes of a model's own, which no exported program has: they are refused by name.

An export sees the forward pass of an `autograd.Function`, and differentiates that. A gradient
reversal would train with the other sign, without a word.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from autopar.errors import ModelError

_TORCHS = "torch."
"""The functions of torch itself (checkpoint's is one) only recompute what autograd would keep."""


@contextmanager
def none_of_its_own(module: torch.nn.Module, *, train: bool) -> Iterator[None]:
    """Refuse a module whose backward pass has code of its own, found while it is exported.

    Without `train` there is no backward pass, and nothing is refused.
    """
    if not train:
        yield
        return
    _require_no_hooks(module)
    called: dict[str, None] = {}
    apply = torch.autograd.Function.__dict__["apply"]

    def recorded(kind: type, *args: Any, **kwargs: Any) -> Any:
        if not kind.__module__.startswith(_TORCHS):
            called[kind.__qualname__] = None
        return apply.__get__(None, kind)(*args, **kwargs)

    torch.autograd.Function.apply = classmethod(recorded)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
    if called:
        raise ModelError(
            f"{next(iter(called))} is an autograd.Function with a backward pass of its own, which "
            "a planned program would not have: write it with operators that torch differentiates "
            "(x.detach() and torch.where do what most need), or plan without training"
        )


def _require_no_hooks(module: torch.nn.Module) -> None:
    """Refuse hooks on the gradients of submodules."""
    for path, part in module.named_modules():
        if part._backward_hooks or part._backward_pre_hooks:
            raise ModelError(
                f"{path or 'the module'} has a backward hook, which would never run in a planned "
                "program: remove it (the handle's remove()), or put hooks on parameters, which the "
                "planned ones take over"
            )
