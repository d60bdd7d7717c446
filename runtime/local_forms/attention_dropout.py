"""Attention with dropout on its weights, on shards: in torch's order with whole scores, or by counter in blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.ir import Value

from ..draws import current, operator_number
from ..local_call import Cuts, LocalCall
from ..random_bits import Region
from ..random_numbers import Source
from .dropout import exact_dropout
from .dropped_attention import Dropping, dropped_attention
from .registry import register


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Sequence[int],
    cuts: Cuts,
    operator: int,
    dropout_p: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Scaled dot-product attention; the dropped weights are this rank's part of those of all `shape`."""
    draws = current()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if not draws.exact and dropout_p < 1:
        source = Source(draws, operator, Region.of(shape, cuts, query.device))
        return dropped_attention(query, key, value, attn_mask, Dropping(source, dropout_p, scale, is_causal))
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    weights = query @ key.transpose(-2, -1) * scale
    if is_causal:
        visible = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
        weights = weights.masked_fill(~visible, -math.inf)
    if attn_mask is not None:
        weights = weights.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else weights + attn_mask
    return exact_dropout(torch.softmax(weights, -1), dropout_p, shape, cuts) @ value


def _dropped(call: LocalCall) -> Mapping[str, Value] | None:
    """The attributes of a local dropout mask, which is on [..., heads, queries, keys]; None without dropout."""
    if not call.operator.attributes.get("dropout_p"):
        return None
    shape = (*call.outputs[0].shape[:-1], call.inputs[1].shape[-2])  # of the output, since queries may be broadcast over batches
    cuts = tuple(tuple(cut) for cut in call.cuts(call.decision.outputs[0]))
    return {"shape": shape, "cuts": cuts, "operator": operator_number(call.operator.name)}


register("aten.scaled_dot_product_attention.default", knows=_dropped, local=attention)
