"""Ring attention: queries and keys are split alike, and the blocks of keys and values travel once around the axis.

    o   = sum_j w_j o_j,   w_j = exp(l_j - l)
    l   = log sum_j exp(l_j)
    l_j = log sum_k exp(s_k)                     over the keys k of block j

with o_j the attention to block j alone (Liu et al. 2023, arXiv:2310.01889). The next block travels during the attention
to the present one. Backward, scores are computed again from l, and each block's gradients travel around behind it. A
block that the queries cannot see costs only its travel; under a causal mask the last rank sees all blocks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir import Value

from ..collectives import AxisGroup, arrived, set_off
from ..local_call import LocalCall
from ..local_forms.registry import register
from .blocks import Ahead, Attended, Corner, Seen, attend, finite, gradients, merge, nothing


class Round(NamedTuple):
    """The common data of all rounds: the ring, the scale of the scores, and the keys seen by place."""

    group: AxisGroup
    scale: float
    seen: Seen

    def block(self, number: int, queries: int, keys: int) -> Corner | None:
        """The place of this round's block relative to our queries; None if they see nothing of it."""
        source = (self.group.coordinate - number) % self.group.size
        place = Corner(self.group.coordinate * queries, source * keys)
        return None if self.seen.nothing(place, queries, keys) else place


def _joined(key: Tensor, value: Tensor) -> Tensor:
    return torch.cat((key.reshape(-1), value.reshape(-1)))


def _apart(both: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    return both[: key.numel()].view(key.shape), both[key.numel() :].view(value.shape)


class _Ring(torch.autograd.Function):
    """Attention of local queries to all keys, and the logs of the sums of exponentials; keeps only local tensors."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: Round) -> tuple[Tensor, Tensor]:
        k, v, result = key, value, nothing(query, key, value)
        for number in range(spec.group.size):
            last = number == spec.group.size - 1
            coming = None if last else set_off(_joined(k, v), spec.group)
            place = spec.block(number, query.shape[-2], key.shape[-2])
            if place is not None:
                result = merge(result, attend(query, k, v, mask, spec.seen, place, spec.scale))
            if coming is not None:
                k, v = _apart(arrived(coming), key, value)
        out = result[0].to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, result[1])
        ctx.spec = spec
        ctx.mark_non_differentiable(result[1])
        return out, result[1]

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        query, key, value, mask, out, normal = ctx.saved_tensors
        spec: Round = ctx.spec
        wide = normal.dtype
        ahead = Ahead(upstream[0], out, normal)
        d_query = torch.zeros_like(query, dtype=wide)
        d_mask = torch.zeros_like(mask, dtype=wide) if mask is not None and ctx.needs_input_grad[3] else None
        k, v, travelling = key, value, None
        for number in range(spec.group.size):
            last = number == spec.group.size - 1
            coming = None if last else set_off(_joined(k, v), spec.group)
            place = spec.block(number, query.shape[-2], key.shape[-2])
            own = torch.zeros_like(_joined(k, v), dtype=wide)
            if place is not None:
                d_both = _apart(own, key, value)
                gradients((query, k, v, mask), ahead, (d_query, *d_both, d_mask), spec.seen, place, spec.scale)
            travelling = set_off(own if travelling is None else own + arrived(travelling), spec.group)
            if coming is not None:
                k, v = _apart(arrived(coming), key, value)
        assert travelling is not None
        d_key, d_value = _apart(arrived(travelling), key, value)
        found = None if d_mask is None else d_mask.to(mask.dtype)
        return d_query.to(query.dtype), d_key.to(key.dtype), d_value.to(value.dtype), found, None


def ring(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, spec: Round) -> Attended:
    """Attention of [..., heads, local queries, width] to all ranks' keys; mask: [..., local queries, all keys]."""
    out: Attended = _Ring.apply(query, key, value, mask, spec)  # type: ignore[no-untyped-call]
    return out


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: AxisGroup,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As `torch.nn.functional.scaled_dot_product_attention`, with this rank's shards and a mask over all keys."""
    assert not dropout_p
    spec = Round(group, 1 / math.sqrt(query.shape[-1]) if scale is None else scale, Seen(0 if is_causal else None, None))
    if query.dim() == 2:
        return ring(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), attn_mask, spec)[0].squeeze(0)
    return ring(query, key, value, attn_mask, spec)[0]


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    group: AxisGroup,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> Attended:
    """As `aten._scaled_dot_product_flash_attention_for_cpu`; a query that sees nothing has 0 as second result."""
    assert not dropout_p
    spec = Round(group, 1 / math.sqrt(query.shape[-1]) if scale is None else scale, Seen(0 if is_causal else None, None))
    out, normal = ring(query, key, value, attn_mask, spec)
    return out, finite(normal).squeeze(-1)


def onnx_attention(
    *,
    Q: Tensor,
    K: Tensor,
    V: Tensor,
    group: AxisGroup,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: int = 0,
    q_num_heads: int = 0,
    kv_num_heads: int = 0,
    left_window_size: int = -1,
    right_window_size: int = -1,
    **_: Any,
) -> tuple[Tensor, ...]:
    """ONNX `Attention` without a cache, other attributes at their defaults; returns local keys and values too."""
    query, key, value = _heads(Q, q_num_heads), _heads(K, kv_num_heads), _heads(V, kv_num_heads)
    low = 0 if is_causal else -right_window_size if right_window_size >= 0 else None
    seen = Seen(low, left_window_size if left_window_size >= 0 else None)
    if attn_mask is not None:
        missing = key.shape[-2] * group.size - attn_mask.shape[-1]
        attn_mask = F.pad(attn_mask, [0, missing], value=False if attn_mask.dtype == torch.bool else -math.inf)
        attn_mask = attn_mask.unsqueeze(0) if attn_mask.dim() == 1 else attn_mask
    y = ring(query, key, value, attn_mask, Round(group, 1 / math.sqrt(query.shape[-1]) if scale is None else scale, seen))[0]
    return (y if Q.dim() == 4 else y.transpose(1, 2).flatten(2)), key, value


def _heads(x: Tensor, count: int) -> Tensor:
    return x if x.dim() == 4 else x.reshape(*x.shape[:2], count, x.shape[2] // count).transpose(1, 2)


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "aten.scaled_dot_product_attention.default": attention,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": flash_attention,
    "onnx.Attention": onnx_attention,
}


def split_keys(call: LocalCall, group: AxisGroup) -> tuple[Callable[..., Any], Mapping[str, Value]]:
    """The local form of an attention whose queries and keys are split."""
    return _FUNCTIONS[call.operator.kind], {"group": group}


register("ring", talks=split_keys)
