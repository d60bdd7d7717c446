"""Rows of the busiest of n ranks that split a layer of experts, over the mean of all ranks.

Ranks have equal blocks of the experts, in order; each row goes to one of a token's k experts, which
are distinct. With c_i rows for expert i:

    even      1
    counts    n max over the blocks of (sum of c_i in the block) / (sum of all c_i)
    worst     n min(k, experts of a rank) / k: every token has as many of its experts as it can
              in one block

The expectation is that of the stated counts; rows drawn anew for every batch vary around it.
Experts of a fixed capacity are padded to it, so that all ranks have equally many rows: 1. The form
is the maximum load of M. Gale et al., "MegaBlocks" (arXiv:2211.15841), section 3, by blocks.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.errors import UsageError


def busiest(counts: Sequence[float], ranks: int) -> float:
    """Return the rows of the busiest rank over the mean, with so many rows for each expert.

    >>> busiest([4, 2, 1, 1], 2), busiest([1, 1, 1, 1], 2)
    (1.5, 1.0)
    """
    if len(counts) % ranks:
        raise UsageError(f"{len(counts)} experts do not lie evenly on {ranks} ranks")
    own = len(counts) // ranks
    blocks = (sum(counts[start : start + own]) for start in range(0, len(counts), own))
    return ranks * max(blocks) / sum(counts)


def worst(experts: int, top_k: int, ranks: int) -> float:
    """Return the same with all tokens on one rank, as far as their experts are distinct.

    >>> worst(128, 8, 32), worst(8, 2, 8)
    (16.0, 4.0)
    """
    return ranks * min(top_k, experts // ranks) / top_k
