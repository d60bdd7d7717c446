"""Defines operators of torch's dispatcher: each keeps its inputs only, and its backward pass
computes the forward pass again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]


def precise(dtype: torch.dtype) -> torch.dtype:
    """The type of sums: single precision at least."""
    return torch.promote_types(dtype, torch.float32)


@contextmanager
def _recording() -> Iterator[None]:
    """Autograd records inside a kernel, which the dispatcher calls below autograd."""
    hidden = torch._C._dispatch_tls_local_exclude_set()
    for name in ("AutogradFunctionality", "ADInplaceOrView"):
        key = getattr(torch._C.DispatchKey, name, None)
        hidden = hidden if key is None else hidden.remove(key)
    included = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(included, hidden), torch.enable_grad():
        yield


def define(
    name: str, schema: str, function: Callable[..., Tensor], fake: Callable[..., Tensor]
) -> None:
    """An operator and the operator of its gradients, of all of its tensors that are numbers.

    Both compute `function` when they are called, the gradients' once more. `fake` makes empty
    results of its arguments.
    """

    def gradients(gradient: Tensor, *arguments: Any) -> list[Tensor]:
        with _recording():
            given = [a.detach().requires_grad_() if isinstance(a, Tensor) else a for a in arguments]
            made = function(*given)
            tensors = [a for a in given if isinstance(a, Tensor)]
            return [g.contiguous() for g in torch.autograd.grad(made, tensors, gradient)]

    def fake_gradients(gradient: Tensor, *arguments: Any) -> list[Tensor]:
        return [a.new_empty(a.shape) for a in arguments if isinstance(a, Tensor)]

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*(a for a in inputs if isinstance(a, Tensor)))
        ctx.others = [None if isinstance(a, Tensor) else (a,) for a in inputs]

    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        arguments = [next(saved) if other is None else other[0] for other in ctx.others]
        made = iter(getattr(torch.ops.autopar, f"{name}_backward")(gradient, *arguments))
        return tuple(next(made) if other is None else None for other in ctx.others)

    LIBRARY.define(f"{name}({schema}) -> Tensor")
    LIBRARY.define(f"{name}_backward(Tensor gradient, {schema}) -> Tensor[]")
    LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    LIBRARY.impl(f"{name}_backward", gradients, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", fake, lib=LIBRARY)
    torch.library.register_fake(f"autopar::{name}_backward", fake_gradients, lib=LIBRARY)
    torch.library.register_autograd(f"autopar::{name}", backward, setup_context=keep, lib=LIBRARY)
