"""The seconds for which computation waits: by hand, and together all that a step has beside its
computation.
"""

from __future__ import annotations

import math
from collections import defaultdict
from itertools import product

import pytest

from autopar.costmodel.step import timeline as timelines
from autopar.costmodel.step.reasons import Reason
from autopar.costmodel.step.streams import Streams
from autopar.costmodel.step.timeline import Timeline
from autopar.sharding.schedule import Schedule
from tests.costmodel.step.test_timeline import MIB, NAMES, case, played

ZEROS = {
    1: {"gathered": "per_step", "accumulated": "whole"},
    2: {"gathered": "per_step", "accumulated": "shards"},
    3: {"gathered": "per_pass", "accumulated": "shards"},
}


def by_reason(of_step: Timeline) -> dict[Reason, float]:
    sums: dict[Reason, float] = defaultdict(float)
    for wait in of_step.waits:
        sums[wait.reason] += wait.times * wait.seconds
    return sums


def test_a_wait_knows_its_transfer_and_what_made_it_late() -> None:
    """a: 2 s alone. b: issued with it on the same stream, so 2 of its 3 s are the other's."""
    streams = Streams(1.0)
    first = streams.send("a", "all_gather", "gpu", 2.0, Reason.VALUES)
    second = streams.send("b", "all_gather", "gpu", 3.0, Reason.GATHERS)
    streams.compute("x", "mm", 0.5)
    streams.wait(first)
    streams.wait(first)
    streams.phase = "backward"
    streams.wait(second)
    streams.ends = True
    third = streams.send("c", "all_reduce", "gpu", 1.0, Reason.VALUES)
    streams.compute("y", "mm", 2.0)
    streams.wait(third)
    played = streams.play()
    assert [(one.sent.name, *one[1:5]) for one in played.waits] == [
        ("a", Reason.VALUES, "forward", 1.5, 0.0),
        ("b", Reason.GATHERS, "backward", 3.0, 2.0),
    ]
    assert played.now == 7.0, "the third was over by then"


def test_the_end_waits_for_all_that_is_under_way() -> None:
    streams = Streams(1.0)
    streams.send("a", "all_reduce", "gpu", 2.0, Reason.REDUCTIONS)
    streams.send("b", "all_reduce", "gpu", 1.0, Reason.REDUCTIONS)
    streams.compute("y", "mm", 0.5)
    streams.finish()
    played = streams.play()
    assert [(one.sent.name, one.reason, one.seconds) for one in played.waits] == [
        ("a", Reason.END, 1.5),
        ("b", Reason.END, 1.0),
    ]


def test_a_stretch_is_recorded_once_and_played_as_often_as_it_is_named() -> None:
    streams = Streams(1.0)
    recorded = []

    def record() -> None:
        recorded.append("once")
        coming = streams.send("x", "send", "a", 3.0, Reason.VALUES)
        streams.compute("y", "mm", 1.0)
        streams.wait(coming)

    for _ in range(3):
        streams.stretch("pass", record)
    played = streams.play()
    assert recorded == ["once"]
    assert [wait.seconds for wait in played.waits] == [2.0] * 3
    assert (played.now, len(played.events)) == (9.0, 6)


def test_a_transfer_on_a_shared_link_is_late_by_what_others_send() -> None:
    streams = Streams(1.0, {stream: {"link": 1.0} for stream in "ab"})
    one = streams.send("x", "send", "a", 4.0, Reason.VALUES)
    streams.send("y", "send", "b", 1.0, Reason.VALUES)
    streams.wait(one)
    (wait,) = streams.play().waits
    assert wait.seconds == pytest.approx(5.0)
    assert wait.late == pytest.approx(1.0)


def test_what_is_repeated_counts_as_often() -> None:
    streams = Streams(2.0)
    streams.wait(streams.send("x", "send", "a", 1.0, Reason.VALUES))
    streams.mark()
    coming = streams.send("x", "send", "a", 3.0, Reason.VALUES)
    streams.compute("y", "mm", 1.0)
    streams.wait(coming)
    streams.repeat(5)
    played = streams.play()
    assert played.now == 1.0 + 6 * 3.0
    assert played.spent["forward"] == 6 * 1.0 and played.slowed == 6 * 1.0
    assert played.communication == 1.0 + 6 * 3.0
    assert sum(one.times * one.seconds for one in played.waits) == 1.0 + 6 * 1.0


@pytest.mark.parametrize(("name", "zero"), list(product(NAMES, ZEROS)))
@pytest.mark.parametrize("slowdown", [1.0, 1.1256])
def test_waits_and_slowdown_are_all_that_a_step_has_beside_computation(
    name: str, zero: int, slowdown: float
) -> None:
    actual = case(name)
    for count, hides in product((1, 2, 7), (True, False)):
        schedule = Schedule(unit_bytes=4 * MIB, micro_batches=count, **ZEROS[zero])  # type: ignore[arg-type]
        timed = played(actual, schedule, slowdown=slowdown, gradients=hides, prefetch=hides)
        computed = timed.forward + timed.backward + timed.update
        beside = math.fsum([timed.slowed, *by_reason(timed).values()])
        assert beside == pytest.approx(timed.step - computed, abs=1e-12 * timed.step)
        assert abs(timed.slowed) <= 1e-12 * timed.step or slowdown > 1.0
        assert all(
            0.0 <= one.late <= one.seconds * (1 + 1e-9) + 1e-12 * timed.step for one in timed.waits
        )


@pytest.mark.parametrize(("name", "zero"), [("both", 1), ("zero3", 2), ("zero3", 3)])
def test_micro_batches_that_are_not_played_wait_as_those_that_are(
    name: str, zero: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    actual = case(name)
    schedule = Schedule(unit_bytes=4 * MIB, micro_batches=9, **ZEROS[zero])  # type: ignore[arg-type]
    short = played(actual, schedule)
    monkeypatch.setattr(timelines, "PLAYED", 9)
    whole = played(actual, schedule)
    assert len(whole.waits) > len(short.waits)
    near = pytest.approx
    assert by_reason(short) == {
        reason: near(seconds, rel=1e-6, abs=1e-9 * whole.step)
        for reason, seconds in by_reason(whole).items()
    }


def test_reasons_are_told_apart() -> None:
    """Without overlap a reduction is waited for at once, with the gathers before it on its stream;
    then the end of the step waits for none.
    """
    schedule = Schedule(unit_bytes=4 * MIB, micro_batches=2, **ZEROS[3])  # type: ignore[arg-type]
    timed = played(case("zero3"), schedule, gradients=False, prefetch=False)
    assert set(by_reason(timed)) == {Reason.GATHERS, Reason.REDUCTIONS, Reason.VALUES}
    kinds = {one.reason: one.sent.kind for one in timed.waits}
    assert kinds[Reason.GATHERS] == "all_gather" and kinds[Reason.REDUCTIONS] == "reduce_scatter"
    own = [one.seconds - one.late for one in timed.waits if one.reason is Reason.REDUCTIONS]
    sent = [event.end - event.start for event in timed.events if event.kind == "reduce_scatter"]
    assert math.fsum(own) == pytest.approx(math.fsum(sent))
    hidden = by_reason(played(case("zero3"), schedule))
    assert 0.0 < hidden[Reason.END] < hidden[Reason.GATHERS]
    assert sum(hidden.values()) < sum(by_reason(timed).values())
