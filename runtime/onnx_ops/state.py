"""Layers that carry a state along the sequence: linear attention and causal convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from .dtypes import wide

Tensor = torch.Tensor


def causal_convolution(
    *, input: Tensor, weight: Tensor, bias: Tensor | None = None, past_state: Tensor | None = None, activation: str = "none"
) -> tuple[Tensor, Tensor]:
    """A convolution of every channel over its past alone; also the last inputs, which are the next call's past."""
    if activation not in ("none", "silu", "swish"):
        raise ValueError(f"unknown activation {activation!r}: valid are none, silu, swish")
    count = weight.shape[-1] - 1
    past = input.new_zeros(*input.shape[:2], count) if past_state is None else past_state
    padded = torch.cat((past, input), dim=2)
    y = F.conv1d(padded, weight, bias, groups=input.shape[1])
    return (y if activation == "none" else F.silu(y)), padded.narrow(2, padded.shape[2] - count, count)


def _by_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads x size) as (batch, heads, length, size)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def linear_attention(
    *,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    past_state: Tensor | None = None,
    decay: Tensor | None = None,
    beta: Tensor | None = None,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
    chunk_size: int = 64,
) -> tuple[Tensor, Tensor]:
    """Attention by a state S = exp(decay) S + k v', read as q S; under a delta rule v' = beta (v - S k)."""
    if update_rule not in ("linear", "gated", "delta", "gated_delta"):
        raise ValueError(f"unknown update_rule {update_rule!r}: valid are linear, gated, delta, gated_delta")
    gated, corrected = update_rule.startswith("gated"), update_rule.endswith("delta")
    if (decay is None) == gated or (beta is None) == corrected:
        raise ValueError(f"the update_rule {update_rule!r} does not go with the inputs decay and beta given")
    dtype = wide(query)
    q, k, v = _by_heads(query, q_num_heads), _by_heads(key, kv_num_heads), _by_heads(value, kv_num_heads)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    fading = None if decay is None else _by_heads(decay, kv_num_heads).to(dtype).exp()
    strength = None if beta is None else beta.to(dtype).transpose(1, 2).unsqueeze(-1)
    state = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3]) if past_state is None else past_state.to(dtype)
    group = q_num_heads // kv_num_heads
    reads = []
    for t in range(q.shape[2]):
        written = v[:, :, t]
        if fading is not None:
            state = state * fading[:, :, t].unsqueeze(-1)
        if strength is not None:
            written = strength[:, :, t] * (written - torch.einsum("bhdm,bhd->bhm", state, k[:, :, t]))
        state = state + k[:, :, t].unsqueeze(-1) * written.unsqueeze(-2)
        read = state.repeat_interleave(group, dim=1) if group > 1 else state
        reads.append(torch.einsum("bhd,bhdm->bhm", q[:, :, t], read))
    y = torch.stack(reads, dim=1) * (scale or 1 / math.sqrt(q.shape[-1]))
    kept = query.dtype if past_state is None else past_state.dtype
    return y.reshape(*y.shape[:2], -1).to(query.dtype), state.to(kept)


FUNCTIONS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    "CausalConvWithState": causal_convolution, "LinearAttention": linear_attention,
}  # fmt: skip
