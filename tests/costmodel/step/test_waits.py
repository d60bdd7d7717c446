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
from autopar.costmodel.step.streams import Clock
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
    clock = Clock(1.0)
    first = clock.send("a", "all_gather", "gpu", 2.0, 0.0)
    second = clock.send("b", "all_gather", "gpu", 3.0, 0.0)
    second.reason = Reason.GATHERS
    clock.compute("x", "mm", 0.5)
    clock.wait(first)
    clock.wait(first)
    clock.phase = "backward"
    clock.wait(second)
    assert [tuple(one)[:5] for one in clock.waits] == [
        (first, Reason.VALUES, "forward", 1.5, 0.0),
        (second, Reason.GATHERS, "backward", 3.0, 2.0),
    ]
    clock.ends = True
    third = clock.send("c", "all_reduce", "gpu", 1.0, clock.now)
    clock.compute("y", "mm", 2.0)
    clock.wait(third)
    assert len(clock.waits) == 2 and clock.now == 7.0, "it was over by then"


def test_a_transfer_on_a_shared_link_is_late_by_what_others_send() -> None:
    clock = Clock(1.0, {stream: {"link": 1.0} for stream in "ab"})
    one = clock.send("x", "send", "a", 4.0, 0.0)
    clock.send("y", "send", "b", 1.0, 0.0)
    clock.wait(one)
    assert clock.waits[0].seconds == pytest.approx(5.0)
    assert clock.waits[0].late == pytest.approx(1.0)


def test_what_is_repeated_counts_as_often() -> None:
    clock = Clock(2.0)
    clock.wait(clock.send("x", "send", "a", 1.0, 0.0))
    mark = clock.mark()
    coming = clock.send("x", "send", "a", 3.0, clock.now)
    clock.compute("y", "mm", 1.0)
    clock.wait(coming)
    clock.repeat(mark, 5)
    assert clock.now == 1.0 + 6 * 3.0
    assert clock.spent["forward"] == 6 * 1.0 and clock.slowed == 6 * 1.0
    assert sum(clock.sent) == 1.0 + 6 * 3.0
    assert sum(one.times * one.seconds for one in clock.waits) == 1.0 + 6 * 1.0


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
    kinds = {one.reason: timed.events[one.sent.event].kind for one in timed.waits}
    assert kinds[Reason.GATHERS] == "all_gather" and kinds[Reason.REDUCTIONS] == "reduce_scatter"
    own = [one.seconds - one.late for one in timed.waits if one.reason is Reason.REDUCTIONS]
    sent = [event.end - event.start for event in timed.events if event.kind == "reduce_scatter"]
    assert math.fsum(own) == pytest.approx(math.fsum(sent))
    hidden = by_reason(played(case("zero3"), schedule))
    assert 0.0 < hidden[Reason.END] < hidden[Reason.GATHERS]
    assert sum(hidden.values()) < sum(by_reason(timed).values())
