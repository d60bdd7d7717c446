"""Gated linear recurrences, computed in chunks.

    S_t = exp(g_t) S_{t-1} + k_t u_t^T        u_t = v_t, or with the delta rule
    y_t = S_t^T q_t                           u_t = beta_t (v_t - (exp(g_t) S_{t-1})^T k_t)

In a chunk that begins with the state S, with G the sums of g up to each row:

    (I + A) u = beta v - beta (k exp(G)) S    A_ij = beta_i k_i . k_j exp(G_i - G_j), j < i
    y         = (q exp(G)) S + (q k^T exp(G_i - G_j), j <= i) u
    S'        = exp(G_last) S + (k exp(G_last - G))^T u

Without the delta rule A is 0. S. Yang et al., "Parallelizing Linear Transformers with the Delta
Rule" (arXiv:2406.06484), section 3; S. Yang et al., "Gated Delta Networks" (arXiv:2412.06464),
section 3.3; T. Dao and A. Gu, "Transformers are SSMs" (arXiv:2405.21060), section 6.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

CHANNEL_ROWS = 16
"""Rows of a chunk where every channel of a key decays by itself.

Decays between two rows are then a vector for each pair of rows, which is held in memory.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recurrence:
    """Queries and keys [..., t, w], values [..., t, e], and decay in logarithms.

    `decay` is [..., t, 1] or [..., t, w]; `beta` [..., t, 1] is that of the delta rule.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    decay: Tensor
    beta: Tensor | None


def chunked_recurrence(
    given: Recurrence, rows: int, state: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Results [..., t, e] and the last state, from the first one [..., w, e] (None: zeros)."""
    values = given.values
    decay = given.decay
    beta = given.beta
    length = values.shape[-2]
    if decay.shape[-1] > 1:
        rows = min(rows, CHANNEL_ROWS)
    rows = max(1, min(rows, length))

    def chunks(x: Tensor) -> Tensor:
        padded = functional.pad(x, (0, 0, 0, -length % rows))
        return padded.reshape(*x.shape[:-2], -1, rows, x.shape[-1])

    q = chunks(given.queries)
    k = chunks(given.keys)
    v = chunks(values)
    total = chunks(decay).cumsum(-2)
    ahead = torch.ones(rows, rows, dtype=torch.bool, device=q.device).triu(1)
    scores = _decayed_products(q, k, total, ahead)
    into = k * (total[..., -1:, :] - total).exp()
    read = q * total.exp()
    seen: Tensor | None = None
    if beta is not None:
        weighted = k * chunks(beta)
        system = _decayed_products(weighted, k, total, ahead).tril(-1)
        sides = torch.cat((v * chunks(beta), weighted * total.exp()), dim=-1)
        # The diagonal is taken as ones: I + A.
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        v, seen = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    remaining = total[..., -1, :, None].exp()
    if state is None:
        state = v.new_zeros(*v.shape[:-3], k.shape[-1], v.shape[-1])
    results = []
    for i in range(v.shape[-3]):
        updates = v[..., i, :, :]
        if seen is not None:
            updates = updates - seen[..., i, :, :] @ state
        results.append(read[..., i, :, :] @ state + scores[..., i, :, :] @ updates)
        state = remaining[..., i, :, :] * state + into[..., i, :, :].mT @ updates
    return torch.stack(results, dim=-3).flatten(-3, -2)[..., :length, :], state


def _decayed_products(left: Tensor, keys: Tensor, total: Tensor, ahead: Tensor) -> Tensor:
    """Products of rows with the keys up to their own, decayed by what lies between."""
    # Above the diagonal the exponent is positive and may overflow, so it is masked before.
    if total.shape[-1] == 1:
        return (left @ keys.mT) * (total - total.mT).masked_fill(ahead, -torch.inf).exp()
    between = (total.unsqueeze(-2) - total.unsqueeze(-3)).masked_fill(ahead[..., None], -torch.inf)
    return (left.unsqueeze(-2) * keys.unsqueeze(-3) * between.exp()).sum(-1)
