"""The scores by which sparse attention chooses the keys of a query, as one operator.

    scores[b, s, t] = sum over h of  weights[b, s, h] relu(scale query[b, s, h] . key[b, t])

Heads share the keys. Products of all heads with all keys are made for some queries at a time, in
single precision; a backward pass holds them all. Source: DeepSeek-AI, DeepSeek-V3.2 (2025),
section 2.1, the lightning indexer.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .defining import define, precise

BLOCK = 1 << 24
"""Products of a query, a head and a key that are in memory at a time: 64 MiB."""


def index_scores(query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor:
    """Scores [b, s, t] of `query` [b, s, h, d], `key` [b, t, d] and `weights` [b, s, h].

    They are of single precision at least.
    """
    dtype = precise(query.dtype)
    keys = key.to(dtype).mT
    samples, length, heads, _ = query.shape
    rows = max(1, BLOCK // max(samples * heads * key.shape[1], 1))
    parts = []
    for start in range(0, length, rows):
        some = query[:, start : start + rows].to(dtype)
        weighed = weights[:, start : start + rows].to(dtype)
        products = torch.matmul(some.flatten(1, 2), keys).reshape(*some.shape[:3], -1)
        seen = functional.relu(products * scale)
        parts.append(torch.matmul(weighed.unsqueeze(-2), seen).squeeze(-2))
    return torch.cat(parts, 1)


def _empty(query: Tensor, key: Tensor, weights: Tensor, scale: float) -> Tensor:
    return query.new_empty((*query.shape[:2], key.shape[1]), dtype=precise(query.dtype))


define(
    "index_scores", "Tensor query, Tensor key, Tensor weights, float scale", index_scores, _empty
)
