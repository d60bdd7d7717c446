"""Torch's kernels of flash attention, on CPUs and on GPUs, with the logs of sums that they keep.

    o = exp(s - l) v,   l = log sum exp(s),   s = scale q kᵀ

Backward they compute the weights again from o and l (T. Dao, FlashAttention-2, arXiv:2307.08691).
Given o and l of an attention to more than these keys, they so give the gradients of that one.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_WIDEST = 256
_AMPERE = (8, 0)


def covers(query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int) -> bool:
    """Whether a kernel computes the attention of [batch, heads, queries, width].

    `causal`: a query sees the keys up to its own place; `window`: only so many of them (0: all).
    """
    if query.dim() != 4 or query.shape[0] != key.shape[0] or query.shape[-1] != value.shape[-1]:
        return False
    if len({query.dtype, key.dtype, value.dtype}) > 1 or query.shape[1] % key.shape[1]:
        return False
    # Kernels do not agree on where the diagonal lies in scores that are no square.
    if causal and query.shape[2] != key.shape[2]:
        return False
    if query.device.type == "cpu":
        return not window
    return query.is_cuda and _on_gpu(query)


def _on_gpu(query: Tensor) -> bool:
    width = query.shape[-1]
    return (
        query.dtype in (torch.bfloat16, torch.float16)
        and width % 8 == 0
        and width <= _WIDEST
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= _AMPERE
    )


def forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Results [batch, heads, queries, width] and the logs [batch, heads, queries, 1]."""
    if query.is_cuda:
        given = [x.transpose(1, 2) for x in (query, key, value)]
        lengths = (query.shape[2], key.shape[2])
        out, normal, *_ = _ATEN._flash_attention_forward(
            *given, None, None, *lengths, 0.0, causal, False, scale=scale, **_sides(window)
        )
        return out.transpose(1, 2), normal.unsqueeze(-1)
    heads = query.shape[1]
    out, normal = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        query, _repeated(key, heads), _repeated(value, heads), 0.0, causal, scale=scale
    )
    return out, normal.unsqueeze(-1)


def backward(
    upstream: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    causal: bool,
    window: int,
    scale: float,
) -> list[Tensor]:
    """The gradients of queries, keys and values.

    `upstream`: the gradient of the results, these, and the logs [batch, heads, queries, 1].
    """
    query, key, value = inputs
    gradient, out, normal = upstream
    logs = normal.squeeze(-1).contiguous()
    if query.is_cuda:
        given = [x.transpose(1, 2) for x in (gradient, query, key, value, out)]
        lengths = (query.shape[2], key.shape[2])
        # The state of random numbers, of which a pass without dropout reads none.
        state = [torch.zeros(n, dtype=torch.uint64, device=query.device) for n in ((2,), ())]
        made = _ATEN._flash_attention_backward(
            *given, logs, None, None, *lengths, 0.0, causal, *state, scale=scale, **_sides(window)
        )
        return [x.transpose(1, 2) for x in made]
    heads = query.shape[1]
    keys = [_repeated(x, heads) for x in (key, value)]
    own, *shared = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, query, *keys, out, logs, 0.0, causal, scale=scale
    )
    if key.shape[1] == heads:
        return [own, *shared]
    return [own, *(x.unflatten(1, (key.shape[1], -1)).sum(2) for x in shared)]


def _sides(window: int) -> dict[str, Any]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _repeated(x: Tensor, heads: int) -> Tensor:
    """The heads of keys, each for as many heads of queries; the CPU's kernel shares none."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)
