"""The compiled streams equal those in Python, bit by bit, and refuse what they cannot play."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar import compiled
from autopar.compiled import streams_in_python
from autopar.compiled.streams_in_python import ALONE, PHASES, Links, Op, Score, Times

needs_compiled = pytest.mark.skipif(
    compiled.play is streams_in_python.play, reason="the package was installed without a compiler"
)
# Streams 0 and 1 share link 0, 1 and 2 share link 1 in part; 3 is alone.
LINKS = Links(
    group=array("q", [0, 0, 0, ALONE]),
    uses_at=array("q", [0, 1, 3, 4, 4]),
    link=array("q", [0, 0, 1, 1]),
    share=array("d", [1.0, 1.0, 0.4, 1.0]),
)
Operation = tuple[Op, int, float]


@st.composite
def scores(draw: st.DrawFn) -> list[Operation]:
    """Any operations whose waits are for transfers that were sent."""
    seconds = st.integers(1, 300).map(lambda time: time / 7)
    operations: list[Operation] = []
    sent = 0
    marked = False
    for _ in range(draw(st.integers(1, 90))):
        kind = draw(st.sampled_from((Op.COMPUTE, Op.SEND, Op.SEND, Op.WAIT, Op.PHASE, Op.MARK)))
        if kind is Op.WAIT and not sent:
            continue
        # What is repeated begins at a mark.
        kind = Op.REPEAT if kind is Op.MARK and marked else kind
        marked = kind is Op.MARK or (marked and kind is not Op.REPEAT)
        most = {Op.SEND: 3, Op.PHASE: PHASES - 1, Op.REPEAT: 5}.get(kind, 0)
        number = draw(st.integers(1, sent)) if kind is Op.WAIT else draw(st.integers(0, most))
        operations.append((kind, number, draw(seconds)))
        sent += kind is Op.SEND
    return [*operations, (Op.FINISH, 0, 0.0)]


def _played(
    play: Callable[[Score, Links, float, Times], None],
    operations: Sequence[Operation],
    slowdown: float,
    links: Links = LINKS,
) -> Times:
    ops, numbers, seconds = zip(*operations, strict=True)
    sent = ops.count(Op.SEND)
    times = Times(
        starts=array("d", [0.0] * (len(ops) + sent)),
        ends=array("d", [0.0] * (len(ops) + sent)),
        last=array("q", [-1] * (sent + 1)),
        sums=array("d", [0.0] * (2 + PHASES)),
    )
    play(Score(array("q", ops), array("q", numbers), array("d", seconds)), links, slowdown, times)
    return times


@needs_compiled
@settings(max_examples=300, deadline=None)
@given(scores(), st.sampled_from((1.0, 1.1256)))
def test_compiled_streams_equal_python(operations: list[Operation], slowdown: float) -> None:
    results = [
        _played(play, operations, slowdown) for play in (streams_in_python.play, compiled.play)
    ]
    assert results[0] == results[1]


@needs_compiled
def test_many_transfers_under_way() -> None:
    """More than are remembered, on one link and on several."""
    operations = [(Op.SEND, number % 4, 1.0 + number / 3) for number in range(200)]
    operations += [(Op.COMPUTE, 0, 5.0), (Op.WAIT, 1, 0.0), (Op.FINISH, 0, 0.0)]
    results = [_played(play, operations, 1.1) for play in (streams_in_python.play, compiled.play)]
    assert results[0] == results[1]
    assert results[0].sums[0] > 200


@pytest.mark.parametrize("play", [streams_in_python.play, compiled.play])
def test_streams_refuse_to_wait_for_nothing(
    play: Callable[[Score, Links, float, Times], None],
) -> None:
    with pytest.raises(ValueError, match="not sent"):
        _played(play, [(Op.WAIT, 1, 0.0)], 1.0)


@needs_compiled
@pytest.mark.parametrize(
    ("operations", "links", "said"),
    [
        ([(Op.SEND, 4, 1.0)], LINKS, "no stream"),
        ([(Op.PHASE, PHASES, 0.0)], LINKS, "phase"),
        ([(Op.MARK, 0, 0.0)], LINKS._replace(share=array("d")), "belong together"),
        ([(Op.MARK, 0, 0.0)], LINKS._replace(group=array("d")), "types"),
    ],
)
def test_compiled_streams_refuse(operations: list[Operation], links: Links, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        _played(compiled.play, operations, 1.0, links)
