"""Orders that graphs share: what a result rests on, and copies that go on in other processes."""

from __future__ import annotations

import pytest

from autopar.search import Unshared, resting, sharing, sharing_orders
from autopar.search.elimination.shared_orders import Rest, following, share, shared_by
from tests.search.search_graphs import random_graph


def test_a_result_rests_on_the_orders_that_it_uses() -> None:
    with sharing_orders():
        shared = sharing()
        assert shared is not None
        shared_by("first", lambda: 1)
        with resting() as rest:
            assert shared_by("first", lambda: 2) == 1
        assert rest == Rest(entries={0}, alone=True) and shared.holds(rest)
        with resting() as made:
            shared_by("second", lambda: 3)
        assert not made.alone and not shared.holds(made)
        # The value of a key may change, and what rests on the old one no longer holds.
        share("first", 4)
        assert not shared.holds(rest)
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


def test_a_copy_follows_the_log_and_adds_nothing() -> None:
    with sharing_orders():
        shared = sharing()
        assert shared is not None
        shared_by("first", lambda: 1)
        shared.is_copy = True
        assert shared_by("first", lambda: 2) == 1
        with pytest.raises(Unshared):
            shared_by("second", lambda: 2)
        with pytest.raises(Unshared):
            share("first", 2)
        shared.extend([("second", 5)])
        assert shared_by("second", lambda: 2) == 5
