"""Streams that share links do all of their work, and no more at a time than links carry."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costmodel.step.score import ALONE, Entry, Links, Op, Player

# Streams 0 and 1 share link a, 1 and 2 share link b in part; 3 is alone.
LINKS = Links([0, 0, 0, ALONE], [{"a": 1.0}, {"a": 1.0, "b": 0.4}, {"b": 1.0}, {}])
Operation = tuple[Op, int, float]


def _played(operations: Sequence[Operation], slowdown: float, links: Links = LINKS) -> Player:
    player = Player(links, slowdown)
    player.play([Entry(*operation) for operation in operations])
    return player


SECONDS = st.integers(1, 300).map(lambda time: time / 7)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((0, 3)), SECONDS), min_size=1, max_size=60), SECONDS)
def test_a_link_carries_one_transfer_at_a_time(
    sends: list[tuple[int, float]], computed: float
) -> None:
    """Streams 0 and 3 have a link each; computation beside them is slower until they are done."""
    operations = [(Op.SEND, stream, seconds) for stream, seconds in sends]
    operations += [(Op.COMPUTE, 0, computed), (Op.FINISH, 0, 0.0)]
    ends = _played(operations, 1.0).ends
    longest = max(sum(s for stream, s in sends if stream == one) for one in (0, 3))
    assert max(ends) == pytest.approx(max(longest, computed))
    slower = max(_played(operations, 1.5).ends)
    assert max(longest, computed) - 1e-9 <= slower <= max(longest, 1.5 * computed) + 1e-9


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from((0, 1)), SECONDS), min_size=1, max_size=60))
def test_streams_that_share_a_link_take_the_sum(sends: list[tuple[int, float]]) -> None:
    operations = [(Op.SEND, stream, seconds) for stream, seconds in sends]
    ends = _played([*operations, (Op.FINISH, 0, 0.0)], 1.0).ends
    assert max(ends) == pytest.approx(sum(seconds for _, seconds in sends))


def test_many_transfers_under_way() -> None:
    operations = [(Op.SEND, number % 4, 1.0 + number / 3) for number in range(200)]
    operations += [(Op.COMPUTE, 0, 5.0), (Op.WAIT, 1, 0.0), (Op.FINISH, 0, 0.0)]
    assert _played(operations, 1.1).now > 200


def test_streams_refuse_to_wait_for_nothing() -> None:
    with pytest.raises(ValueError, match="not sent"):
        _played([(Op.WAIT, 1, 0.0)], 1.0)
