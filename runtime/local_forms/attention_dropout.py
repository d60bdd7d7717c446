"""Attention with dropout on its weights, on shards.

The weights are whole where torch's order of random numbers is kept, else in blocks whose masks are
drawn by counter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from autopar.ir import Value
from autopar.runtime.operators.local_call import Cuts, LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.random_numbers.counter_bits import Region
from autopar.runtime.random_numbers.distributions import Source
from autopar.runtime.random_numbers.draw_state import current, operator_number

from .blockwise_attention import Dropping, dropped_attention
from .dropout import exact_dropout


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
    """Scaled dot-product attention with dropout, whose mask is this rank's part of the whole.

    shape: of the whole weights.
    """
    draws = current()
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if not draws.exact and dropout_p < 1:
        source = Source(draws, operator, Region.of(shape, cuts, query.device))
        dropping = Dropping(source, dropout_p, scale, is_causal)
        return dropped_attention(query, key, value, attn_mask, dropping)
    # Torch's own generator draws one mask for all weights: they are computed as a whole.
    if enable_gqa and query.shape[-3] != key.shape[-3]:
        group = query.shape[-3] // key.shape[-3]
        key = key.repeat_interleave(group, -3)
        value = value.repeat_interleave(group, -3)
    weights = query @ key.transpose(-2, -1) * scale
    if is_causal:
        visible = torch.ones(weights.shape[-2:], dtype=torch.bool, device=weights.device).tril()
        weights = weights.masked_fill(~visible, -math.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        weights = weights.masked_fill(~attn_mask, -math.inf)
    elif attn_mask is not None:
        weights = weights + attn_mask
    return exact_dropout(torch.softmax(weights, -1), dropout_p, shape, cuts) @ value


def _dropped(call: LocalCall) -> Mapping[str, Value] | None:
    """The attributes of a local dropout mask; None without dropout.

    The mask is on [..., heads, queries, keys].
    """
    if not call.operator.attributes.get("dropout_p"):
        return None
    # The shape of the output's rows, since queries may be broadcast over batches.
    shape = (*call.outputs[0].shape[:-1], call.inputs[1].shape[-2])
    cuts = tuple(tuple(cut) for cut in call.cuts(call.decision.outputs[0]))
    return {"shape": shape, "cuts": cuts, "operator": operator_number(call.operator.name)}


register("aten.scaled_dot_product_attention.default", knows=_dropped, local=attention)
