"""Attention with dropout on its weights, on shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.ir import Value

from ..local_call import Cuts, LocalCall
from .dropout import dropout
from .registry import register


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    shape: Sequence[int],
    cuts: Cuts,
    dropout_p: float,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention with dropout on its weights, written out: the mask is this rank's shard of the whole one."""
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(group, -3), value.repeat_interleave(group, -3)
    weights = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        visible = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
        weights = weights.masked_fill(~visible, -math.inf)
    if attn_mask is not None:
        weights = weights.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else weights + attn_mask
    return dropout(torch.softmax(weights, -1), dropout_p, True, shape, cuts) @ value


def _attention_dropout(call: LocalCall) -> Mapping[str, Value] | None:
    """As `_dropout`, with the mask on [..., heads, queries, keys]."""
    if not call.operator.attributes.get("dropout_p"):
        return None
    shape = (*call.outputs[0].shape[:-1], call.inputs[1].shape[-2])  # of the output: the queries may be read again for every batch
    return {"shape": shape, "cuts": tuple(tuple(cut) for cut in call.cuts(call.decision.outputs[0]))}


register("aten.scaled_dot_product_attention.default", knows=_attention_dropout, local=attention)
