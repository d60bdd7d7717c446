"""Torch's kernels of flash attention, on CPUs and on GPUs, with the logs of sums that they keep.

    o = exp(s - l) v,   l = log sum exp(s),   s = scale q kᵀ

Backward they compute the weights again from o and l (T. Dao, FlashAttention-2, arXiv:2307.08691).
Given o and l of an attention to more than these keys, they so give the gradients of that one.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    batches = {x.shape[0] for x in (query, key, value)}
    widths = {x.shape[-1] for x in (query, key, value)}
    alike = len(batches) == len(widths) == len({x.dtype for x in (query, key, value)}) == 1
    if query.dim() != 4 or not alike or query.shape[1] % key.shape[1]:
        return False
    # Kernels do not agree on where the diagonal lies in scores that are no square.
    if causal and query.shape[2] != key.shape[2]:
        return False
    if query.device.type == "cpu":
        return not window
    return (
        query.is_cuda
        and query.dtype in (torch.bfloat16, torch.float16)
        and query.shape[-1] in range(8, _WIDEST + 1, 8)
        and torch.version.hip is None
        and torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(query.device) >= _AMPERE
    )


def forward(
    query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool, window: int
) -> tuple[Tensor, Tensor]:
    """Results [batch, heads, queries, width] and the logs [batch, heads, queries, 1]."""
    given = _dense(query, key, value)
    if query.is_cuda:
        out, normal, *_ = _ATEN._flash_attention_forward(
            *_turned(given),
            *(None, None, query.shape[2], key.shape[2], 0.0),
            *(causal and not window, False),
            scale=scale,
            **_sides(window),
        )
        return out.transpose(1, 2), normal.unsqueeze(-1)
    out, normal = _ATEN._scaled_dot_product_flash_attention_for_cpu(
        *_repeated(given), 0.0, causal, scale=scale
    )
    return out, normal.unsqueeze(-1)


def backward(
    upstream: tuple[Tensor, Tensor, Tensor],
    inputs: tuple[Tensor, Tensor, Tensor],
    scale: float,
    causal: bool,
    window: int,
) -> list[Tensor]:
    """The gradients of queries, keys and values.

    `upstream`: the gradient of the results, these, and the logs [batch, heads, queries, 1].
    """
    given = _dense(*inputs)
    gradient, out = _dense(*upstream[:2])
    logs = upstream[2].squeeze(-1).contiguous()
    query, key, _ = inputs
    if query.is_cuda:
        # The state of random numbers, of which a pass without dropout reads none.
        state = [torch.zeros(n, dtype=torch.uint64, device=query.device) for n in ((2,), ())]
        made = _ATEN._flash_attention_backward(
            *_turned([gradient, *given, out]),
            *(logs, None, None, query.shape[2], key.shape[2], 0.0),
            *(causal and not window, *state),
            scale=scale,
            **_sides(window),
        )
        return _turned(made)
    own, *shared = _ATEN._scaled_dot_product_flash_attention_for_cpu_backward(
        gradient, *_repeated(given), out, logs, 0.0, causal, scale=scale
    )
    heads = key.shape[1]
    return [own, *(x.unflatten(1, (heads, -1)).sum(2) for x in shared)]


def _dense(*tensors: Tensor) -> list[Tensor]:
    """The tensors with the elements of a row side by side, as kernels want them."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _turned(tensors: Iterable[Tensor]) -> list[Tensor]:
    """[batch, length, heads, width] of [batch, heads, length, width], and back."""
    return [x.transpose(1, 2) for x in tensors]


def _sides(window: int) -> dict[str, Any]:
    return {"window_size_left": window - 1, "window_size_right": 0} if window else {}


def _repeated(given: list[Tensor]) -> list[Tensor]:
    """Each head of keys for as many heads of queries; the CPU's kernel shares none."""
    times = given[0].shape[1] // given[1].shape[1]
    return given if times == 1 else [given[0], *(x.repeat_interleave(times, 1) for x in given[1:])]
