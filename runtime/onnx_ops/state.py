"""Layers that carry a state along the sequence: linear attention and causal convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F

from .dtypes import wide

Tensor = torch.Tensor


def causal_convolution(
    *,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    past_state: Tensor | None = None,
    activation: str = "none",
) -> tuple[Tensor, Tensor]:
    """A convolution of every channel over its past alone.

    Also returns the last inputs, which are the past of the next call.
    """
    if activation not in ("none", "silu", "swish"):
        raise ValueError(f"unknown activation {activation!r}: valid are none, silu, swish")
    # A kernel reaches so many inputs back.
    count = weight.shape[-1] - 1
    past = input.new_zeros(*input.shape[:2], count) if past_state is None else past_state
    padded = torch.cat((past, input), dim=2)
    y = F.conv1d(padded, weight, bias, groups=input.shape[1])
    y = y if activation == "none" else F.silu(y)
    return y, padded.narrow(2, padded.shape[2] - count, count)


def _by_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, length, heads x size) as (batch, heads, length, size)."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(1, 2)


def _walk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    fading: Tensor | None,
    strength: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The reads of the state after each token, (batch, length, heads, width), and the last state.

    fading: factors of the state before a token is written; strength: beta of the delta rule.
    """
    group = q.shape[1] // k.shape[1]
    reads = []
    for t in range(q.shape[2]):
        written = v[:, :, t]
        if fading is not None:
            state = state * fading[:, :, t].unsqueeze(-1)
        if strength is not None:
            present = torch.einsum("bhdm,bhd->bhm", state, k[:, :, t])
            written = strength[:, :, t] * (written - present)
        state = state + k[:, :, t].unsqueeze(-1) * written.unsqueeze(-2)
        read = state.repeat_interleave(group, dim=1) if group > 1 else state
        reads.append(torch.einsum("bhd,bhdm->bhm", q[:, :, t], read))
    return torch.stack(reads, dim=1), state


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
    """Attention by a state S = exp(decay) S + k v', read as q S.

    Under a delta rule v' = beta (v - S k), else v' = v.
    """
    if update_rule not in ("linear", "gated", "delta", "gated_delta"):
        raise ValueError(
            f"unknown update_rule {update_rule!r}: valid are linear, gated, delta, gated_delta"
        )
    gated = update_rule.startswith("gated")
    corrected = update_rule.endswith("delta")
    if (decay is None) == gated or (beta is None) == corrected:
        raise ValueError(
            f"the update_rule {update_rule!r} does not go with the inputs decay and beta given"
        )
    dtype = wide(query)
    # The state sums over the whole sequence: half precision would lose its early tokens.
    q = _by_heads(query, q_num_heads).to(dtype)
    k = _by_heads(key, kv_num_heads).to(dtype)
    v = _by_heads(value, kv_num_heads).to(dtype)
    fading = None if decay is None else _by_heads(decay, kv_num_heads).to(dtype).exp()
    strength = None if beta is None else beta.to(dtype).transpose(1, 2).unsqueeze(-1)
    if past_state is None:
        state = k.new_zeros(*k.shape[:2], k.shape[3], v.shape[3])
    else:
        state = past_state.to(dtype)
    y, state = _walk(q, k, v, state, fading=fading, strength=strength)
    y = y * (scale or 1 / math.sqrt(q.shape[-1]))
    state_dtype = query.dtype if past_state is None else past_state.dtype
    return y.reshape(*y.shape[:2], -1).to(query.dtype), state.to(state_dtype)


FUNCTIONS: Mapping[str, Callable[..., tuple[Tensor, ...]]] = {
    "CausalConvWithState": causal_convolution,
    "LinearAttention": linear_attention,
}
