"""The scans of linear attention and of state spaces as operators: each keeps its inputs only, and
its backward pass computes the forward pass again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .chunked import Recurrence, chunked_recurrence
from .defining import define, precise

NORM_EPSILON = 1e-6


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def gated_delta_rule(
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


def state_space_scan(
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


def state_space_recurrence(
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


def _like(values: int, dtype: Callable[[torch.dtype], torch.dtype]) -> Callable[..., Tensor]:
    """Makes results of the shape of the argument `values`, of a type by that of the first one."""

    def made(*arguments: Any) -> Tensor:
        like = arguments[values]
        empty: Tensor = like.new_empty(like.shape, dtype=dtype(arguments[0].dtype))
        return empty

    return made


define(
    "gated_delta_rule",
    "Tensor query, Tensor key, Tensor value, Tensor decay, Tensor beta, int chunk_size, "
    "bool normalize",
    gated_delta_rule,
    _like(2, lambda dtype: dtype),
)
define(
    "state_space_scan",
    "Tensor x, Tensor step, Tensor decay, Tensor key, Tensor query, Tensor? skip, Tensor? bias, "
    "int chunk_size, bool softplus, float low, float high",
    state_space_scan,
    _like(0, precise),
)
