"""Layers that carry a state along the sequence: linear attention and causal convolutions."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np

from autopar.errors import ModelError, unknown

from .attention import by_heads
from .recurrent import LONGEST
from .symbols import Symbol, cat, promoted, stack
from .windows import convolution


def causal_convolution(
    *,
    input: Symbol,
    weight: Symbol,
    bias: Symbol | None = None,
    past_state: Symbol | None = None,
    activation: str = "none",
) -> tuple[Symbol, Symbol]:
    """A convolution of every channel over its past alone.

    Also returns the last inputs, which are the past of the next call.
    """
    if activation not in ("none", "silu", "swish"):
        raise ModelError(unknown("activation", activation, ("none", "silu", "swish")))
    # A kernel reaches so many inputs back.
    count = weight.shape[-1] - 1
    padded = input.pad((count,), (0,)) if past_state is None else cat((past_state, input), 2)
    y = convolution(X=padded, W=weight, B=bias, group=input.shape[1])
    y = y if activation == "none" else y.map("silu")
    return y, padded.cut(2, padded.shape[2] - count, padded.shape[2])


def _walk(
    q: Symbol,
    k: Symbol,
    v: Symbol,
    state: Symbol,
    *,
    fading: Symbol | None,
    strength: Symbol | None,
) -> tuple[Symbol, Symbol]:
    """The reads of the state after each token, (batch, length, heads, width), and the last state.

    fading: factors of the state before a token is written; strength: beta of the delta rule.
    """
    group = q.shape[1] // k.shape[1]
    reads = []
    for t in range(q.shape[2]):
        written = v.select(2, t)
        key = k.select(2, t)
        if fading is not None:
            state = state * fading.select(2, t).unsqueeze(-1)
        if strength is not None:
            present = (key.unsqueeze(-2) @ state).squeeze(-2)
            written = strength.select(2, t) * (written - present)
        state = state + key.unsqueeze(-1) * written.unsqueeze(-2)
        read = state.repeat_interleave(group, 1) if group > 1 else state
        reads.append((q.select(2, t).unsqueeze(-2) @ read).squeeze(-2))
    return stack(reads, 1), state


_RULES = ("linear", "gated", "delta", "gated_delta")


def linear_attention(
    *,
    query: Symbol,
    key: Symbol,
    value: Symbol,
    past_state: Symbol | None = None,
    decay: Symbol | None = None,
    beta: Symbol | None = None,
    q_num_heads: int,
    kv_num_heads: int,
    scale: float = 0.0,
    update_rule: str = "gated_delta",
    chunk_size: int = 64,
) -> tuple[Symbol, Symbol]:
    """Attention by a state S = exp(decay) S + k v', read as q S.

    Under a delta rule v' = beta (v - S k), else v' = v.
    """
    if update_rule not in _RULES:
        raise ModelError(unknown("update_rule", update_rule, _RULES))
    gated = update_rule.startswith("gated")
    corrected = update_rule.endswith("delta")
    if (decay is None) == gated or (beta is None) == corrected:
        raise ModelError(
            f"the update_rule {update_rule!r} does not go with the inputs decay and beta given"
        )
    if query.shape[1] > LONGEST:
        raise ModelError(f"linear attention over {query.shape[1]} tokens: {LONGEST} at most")
    # The state sums over the whole sequence: half precision would lose its early tokens.
    dtype = promoted(query.dtype, "float32")
    q = by_heads(query, q_num_heads).to(dtype)
    k = by_heads(key, kv_num_heads).to(dtype)
    v = by_heads(value, kv_num_heads).to(dtype)
    fading = None if decay is None else by_heads(decay, kv_num_heads).to(dtype).map("exp")
    strength = None if beta is None else beta.to(dtype).transpose(1, 2).unsqueeze(-1)
    if past_state is None:
        zeros = k.constant(np.zeros((1, 1, 1, 1), np.float32)).to(dtype)
        state = zeros.expand(*k.shape[:2], k.shape[3], v.shape[3])
    else:
        state = past_state.to(dtype)
    y, state = _walk(q, k, v, state, fading=fading, strength=strength)
    y = y * (scale or 1 / math.sqrt(q.shape[-1]))
    state_dtype = query.dtype if past_state is None else past_state.dtype
    return y.reshape(*y.shape[:2], -1).to(query.dtype), state.to(state_dtype)


FUNCTIONS: Mapping[str, Callable[..., tuple[Symbol, ...]]] = {
    "CausalConvWithState": causal_convolution,
    "LinearAttention": linear_attention,
}
