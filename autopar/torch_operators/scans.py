"""The scans of linear attention and of state spaces as operators: each keeps its inputs only, and
its backward pass computes the forward pass again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .chunked import Recurrence, chunked_recurrence

NORM_EPSILON = 1e-6
_LIBRARY: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]


def precise(dtype: torch.dtype) -> torch.dtype:
    """States are summed in single precision at least."""
    return torch.promote_types(dtype, torch.float32)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def gated_delta_rule(  # noqa: PLR0913  (the operator's signature)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor,
    beta: Tensor,
    chunk_size: int,
    normalize: bool,
) -> Tensor:
    """Results [b, t, heads, e] of the gated delta rule.

    `query` and `key` are [b, t, key heads, w], each for consecutive heads of `value`
    [b, t, heads, e]. `decay`, in logarithms, is [b, t, heads], or [b, t, heads, w] for one of each
    channel; `beta` is [b, t, heads]. `normalize`: queries and keys have unit length.
    """
    given = delta_rule_recurrence(query, key, value, decay, beta, normalize)
    made, _ = chunked_recurrence(given, chunk_size)
    return made.transpose(1, 2).to(query.dtype).contiguous()


def delta_rule_recurrence(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, normalize: bool
) -> Recurrence:
    """The recurrence of each head [b, heads, t, ...] of a gated delta rule."""
    dtype = precise(query.dtype)
    shared = value.shape[2] // key.shape[2]
    q, k, v, g, b = (x.to(dtype) for x in (query, key, value, decay, beta))
    if normalize:
        q = _unit(q)
        k = _unit(k)
    q, k = ((x.repeat_interleave(shared, 2) if shared > 1 else x) for x in (q, k))
    g = g if g.dim() == 4 else g.unsqueeze(-1)
    q, k, v, g, b = (x.transpose(1, 2) for x in (q, k, v, g, b.unsqueeze(-1)))
    return Recurrence(queries=q * q.shape[-1] ** -0.5, keys=k, values=v, decay=g, beta=b)


def state_space_scan(  # noqa: PLR0913  (the operator's signature)
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    skip: Tensor | None,
    bias: Tensor | None,
    chunk_size: int,
    softplus: bool,
    low: float,
    high: float,
) -> Tensor:
    """Results [b, t, heads, e] of Mamba-2's scan of `x` [b, t, heads, e], in single precision.

    `step` is [b, t, heads], to which `bias` [heads] is added; `decay` and `skip` are [heads];
    `key` and `query` are [b, t, groups, w], each for consecutive heads.
    """
    given = state_space_recurrence(x, step, decay, key, query, bias, softplus, (low, high))
    made, _ = chunked_recurrence(given, chunk_size)
    return with_skip(made.transpose(1, 2), x, skip)


def with_skip(made: Tensor, x: Tensor, skip: Tensor | None) -> Tensor:
    """Results of a scan and the inputs that pass it by."""
    if skip is None:
        return made.contiguous()
    return (made + skip.to(made.dtype)[:, None] * x.to(made.dtype)).contiguous()


def state_space_recurrence(  # noqa: PLR0913  (the operator's signature)
    x: Tensor,
    step: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    bias: Tensor | None,
    softplus: bool,
    limits: tuple[float, float],
) -> Recurrence:
    """The recurrence of each head [b, heads, t, ...] of a state space."""
    dtype = precise(x.dtype)
    shared = x.shape[2] // key.shape[2]
    steps = step if bias is None else step + bias.to(step.dtype)
    steps = (functional.softplus(steps) if softplus else steps).clamp(*limits).to(dtype)
    values, k, q = (part.to(dtype) for part in (x, key, query))
    q, k = ((part.repeat_interleave(shared, 2) if shared > 1 else part) for part in (q, k))
    parts = (q, k, values * steps[..., None], (decay.to(dtype) * steps)[..., None])
    q, k, v, g = (part.transpose(1, 2) for part in parts)
    return Recurrence(queries=q, keys=k, values=v, decay=g, beta=None)


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


def _define(
    name: str, schema: str, function: Callable[..., Tensor], values: int, dtype: Any
) -> None:
    """An operator and the operator of its gradients, of all of its tensors that are numbers.

    `values`: the place of the argument that has the results' shape. `dtype`: theirs, from that of
    the first argument.
    """

    def fake(*arguments: Any) -> Tensor:
        like = arguments[values]
        made: Tensor = like.new_empty(like.shape, dtype=dtype(arguments[0].dtype))
        return made

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

    _LIBRARY.define(f"{name}({schema}) -> Tensor")
    _LIBRARY.define(f"{name}_backward(Tensor gradient, {schema}) -> Tensor[]")
    _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
    _LIBRARY.impl(f"{name}_backward", gradients, "CompositeExplicitAutograd")
    torch.library.register_fake(f"autopar::{name}", fake, lib=_LIBRARY)
    torch.library.register_fake(f"autopar::{name}_backward", fake_gradients, lib=_LIBRARY)
    torch.library.register_autograd(f"autopar::{name}", backward, setup_context=keep, lib=_LIBRARY)


_define(
    "gated_delta_rule",
    "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, int chunk_size, "
    "bool normalize",
    gated_delta_rule,
    2,
    lambda dtype: dtype,
)
_define(
    "state_space_scan",
    "Tensor x, Tensor step, Tensor decay, Tensor key, Tensor query, Tensor? skip, Tensor? bias, "
    "int chunk_size, bool softplus, float low, float high",
    state_space_scan,
    0,
    precise,
)
