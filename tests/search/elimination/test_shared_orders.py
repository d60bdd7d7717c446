"""Orders that graphs share: what a result rests on."""

from __future__ import annotations

from autopar.search import resting, sharing, sharing_orders
from autopar.search.elimination.shared_orders import Rest, following, shared_by
from tests.search.search_graphs import random_graph


def test_a_result_rests_on_the_orders_that_it_uses() -> None:
    with sharing_orders():
        shared = sharing()
        assert shared is not None
        shared_by("first", lambda: 1)
        with resting() as rest:
            assert shared_by("first", lambda: 2) == 1
        assert rest == Rest(entries={0}, alone=True)
        with resting() as made:
            shared_by("second", lambda: 3)
        assert not made.alone
    assert sharing() is None


def test_what_is_computed_inside_is_rested_on_outside() -> None:
    with sharing_orders():
        shared_by("first", lambda: 1)
        with resting() as outer:
            with resting() as inner:
                shared_by("first", lambda: 1)
            assert inner.entries == {0}
        assert outer.entries == {0}


def test_following_another_graph_is_no_result_of_its_own() -> None:
    graph = random_graph(seed=0)
    with sharing_orders(), resting() as rest:
        assert following("kind", graph, lambda last: last) is None
        assert not rest.alone
