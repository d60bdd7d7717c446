"""Rows of the busiest rank of experts, against every way to route a few tokens."""

from __future__ import annotations

import itertools

import pytest

from autopar.costmodel.device.imbalance import busiest, worst
from autopar.errors import UsageError


@pytest.mark.parametrize(
    ("experts", "top_k", "ranks"), [(4, 2, 2), (4, 3, 2), (6, 2, 3), (4, 2, 4)]
)
def test_no_routing_of_distinct_experts_is_worse_than_the_worst(
    experts: int, top_k: int, ranks: int
) -> None:
    tokens = 3
    seen = 0.0
    choices = list(itertools.combinations(range(experts), top_k))
    for routing in itertools.product(choices, repeat=tokens):
        counts = [sum(expert in chosen for chosen in routing) for expert in range(experts)]
        own = experts // ranks
        rows = [sum(counts[rank * own : (rank + 1) * own]) for rank in range(ranks)]
        assert busiest(counts, ranks) == pytest.approx(max(rows) / (tokens * top_k / ranks))
        seen = max(seen, busiest(counts, ranks))
    assert seen == pytest.approx(worst(experts, top_k, ranks))


def test_blocks_are_in_order_and_even() -> None:
    assert busiest([3, 0, 3, 0], 2) == 1.0
    assert busiest([3, 3, 0, 0], 2) == 2.0
    assert worst(8, 2, 1) == 1.0
    with pytest.raises(UsageError, match="6 experts do not lie evenly on 4 ranks"):
        busiest([1] * 6, 4)
