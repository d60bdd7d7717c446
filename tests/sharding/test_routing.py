"""The expected number of ranks and nodes of a token against drawn routes."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.errors import UsageError
from autopar.sharding.communication import domains_of_a_token

TOKENS = 20_000
ROWS = [
    # experts, experts of a token, domains, groups, open groups
    (128, 8, 32, 1, 1),
    (128, 8, 4, 1, 1),
    (256, 8, 8, 8, 4),
    (256, 8, 64, 8, 4),
    (256, 8, 4, 8, 4),
    (24, 3, 6, 4, 2),
    (24, 4, 3, 4, 2),
    (16, 16, 4, 1, 1),
]


def drawn(experts: int, top_k: int, domains: int, groups: int, open_groups: int) -> float:
    rng = np.random.default_rng(0)
    size = experts // groups
    order = rng.random((TOKENS, groups)).argsort(axis=1) < open_groups
    scores = rng.random((TOKENS, experts)) + 1.0 * np.repeat(order, size, axis=1)
    chosen = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
    hit = np.zeros((TOKENS, domains), dtype=bool)
    np.put_along_axis(hit, chosen // (experts // domains), values=True, axis=1)
    return float(hit.sum(axis=1).mean())


@pytest.mark.parametrize(("experts", "top_k", "domains", "groups", "open_groups"), ROWS)
def test_the_closed_form_is_the_mean_of_drawn_routes(
    experts: int, top_k: int, domains: int, groups: int, open_groups: int
) -> None:
    told = domains_of_a_token(experts, top_k, domains, groups=groups, open_groups=open_groups)
    assert told == pytest.approx(drawn(experts, top_k, domains, groups, open_groups), rel=0.01)


def test_all_of_a_token_lie_on_one_domain_or_on_as_many_as_it_has_experts() -> None:
    assert domains_of_a_token(64, 8, 1) == pytest.approx(1.0)
    assert domains_of_a_token(8, 2, 8) == pytest.approx(2.0)
    assert domains_of_a_token(8, 8, 4) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("domains", "groups", "open_groups", "message"),
    [(3, 1, 1, "do not lie evenly"), (4, 4, 1, "do not lie in 1 of 4 groups of 2")],
)
def test_routes_that_cannot_be_are_refused(
    domains: int, groups: int, open_groups: int, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        domains_of_a_token(8, 4, domains, groups=groups, open_groups=open_groups)
