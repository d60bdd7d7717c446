"""Pipeline schedules: the published times and bubbles, closed forms against the simulated order,
what stages hold, and the table.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.costmodel.step.pipeline_simulation import PipelineRun, simulate
from autopar.errors import UsageError
from autopar.order import positions
from autopar.order.actions import Word, one_by_one
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.schedules import SCHEDULES, in_flight, step_seconds, tabled, thriftiest
from autopar.order.times import Times

FORWARD = Word.FORWARD
BACKWARD = Word.BACKWARD
INPUT = Word.BACKWARD_INPUT
WEIGHT = Word.BACKWARD_WEIGHT
PASSES = (FORWARD, BACKWARD, INPUT, WEIGHT)
EXACT = ("gpipe", "1f1b", "merged_1f1b", "zero_bubble")
NUMBERS = [(1, 3), (2, 2), (2, 7), (3, 2), (4, 4), (4, 9), (5, 20), (8, 8), (8, 32)]


def run_of(name: str, times: Times, micro_batches: int, interleave: int = 1) -> PipelineRun:
    """The simulated order of a model whose chunks hand on to the next ones."""
    stages = len(times.forward)
    edges = neighbours(stages * interleave)
    return simulate(
        pipeline_order(name, stages, micro_batches, interleave, edges=edges), times, interleave
    )


def both(
    name: str, times: Times, micro_batches: int, interleave: int = 1, *, overlap: bool = True
) -> tuple[float, float]:
    """Seconds by the closed form and by the simulation."""
    run = run_of(name, replace(times, overlap=overlap), micro_batches, interleave)
    form = step_seconds(name, replace(times, overlap=overlap), micro_batches, interleave)
    return form, run.seconds


@pytest.mark.parametrize(("p", "m"), NUMBERS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_take_m_plus_p_minus_1_passes(name: str, p: int, m: int) -> None:
    actual = both(name, Times.of([1.25] * p, [2.5] * p), m)
    assert actual == pytest.approx(((m + p - 1) * 3.75,) * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("p", "groups", "v"),
    [(4, 3, 1), (2, 1, 2), (2, 3, 4), (3, 2, 2), (4, 1, 3), (4, 4, 2), (8, 2, 3), (6, 5, 2)],
)
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, groups: int, v: int) -> None:
    m = p * groups
    closed, simulated = both("interleaved", Times.of([1.0] * p, [2.0] * p), m, v)
    assert (closed - 3 * m) / (3 * m) == pytest.approx((p - 1) / (v * m), rel=1e-12)
    assert simulated == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_the_bubble_of_zero_bubble_is_the_published_one(p: int, m: int) -> None:
    """arXiv:2401.10241, table 1: (p - 1)(T_F + T_B - T_W), T_B without the weight gradient; a third
    of 1F1B's where all three are equal.
    """
    forward = 1.0
    inputs = 1.2
    weight = 0.9
    closed, simulated = both(
        "zero_bubble", Times.of([forward] * p, [inputs + weight] * p, weight), m
    )
    assert closed - m * (forward + inputs + weight) == pytest.approx(
        (p - 1) * (forward + inputs - weight), rel=1e-12
    )
    assert simulated == pytest.approx(closed, rel=1e-12)
    equal = Times.of([1.0] * p, [2.0] * p, 1.0)
    assert both("zero_bubble", equal, m)[1] - 3 * m == pytest.approx(
        (both("1f1b", equal, m)[1] - 3 * m) / 3, rel=1e-12
    )


@st.composite
def pipelines(draw: st.DrawFn, uneven: float, sends: float) -> tuple[Times, int]:
    """Stages whose times differ by up to the factor 1 + `uneven`, with sends of up to `sends` of a
    forward pass.
    """
    p = draw(st.integers(2, 7))
    numbers = st.floats(0, 1)
    forward, backward, weight, send = (
        np.array(draw(st.lists(numbers, min_size=p, max_size=p))) for _ in range(4)
    )
    longest = 2 + 2 * uneven * backward
    return Times.of(1 + uneven * forward, longest, longest * 0.6 * weight, sends * send), draw(
        st.integers(1, 24)
    )


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("overlap", [True, False])
@given(pipeline=pipelines(uneven=2.0, sends=1.5))
@settings(max_examples=60, deadline=None)
def test_closed_forms_are_exact_for_unequal_stages_and_sends(
    name: str, overlap: bool, pipeline: tuple[Times, int]
) -> None:
    times, m = pipeline
    assume(not SCHEDULES[name].refusal(len(times.forward), m, 1))
    closed, simulated = both(name, *pipeline, overlap=overlap)
    assert closed == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("overlap", [True, False])
def test_many_micro_batches_are_extrapolated_by_the_exact_period(name: str, overlap: bool) -> None:
    times = Times.of(
        [1.0, 1.25, 1.0, 0.75, 1.25],
        [2.0, 2.25, 2.0, 2.0, 2.25],
        0.75,
        [0.125, 0.5, 0.25, 0.5, 0.0],
    )
    for m in (200, 201, 202, 203):
        closed, simulated = both(name, times, m, overlap=overlap)
        assert closed == pytest.approx(simulated, rel=1e-12)


def test_many_micro_batches_take_no_longer_than_a_thousand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions are walked until they repeat, then counted."""
    taken = []
    step = positions.advance
    monkeypatch.setattr(positions, "advance", lambda *given: taken.append(1) or step(*given))
    times = Times.of([1.0, 1.25, 1.0, 0.75], [2.0, 2.25, 2.0, 2.0], 0.75, 0.125)
    steps = []
    for m in (10**3, 10**5):
        taken.clear()
        step_seconds("zero_bubble", times, m)
        steps.append(len(taken))
    assert steps[1] < 100 and abs(steps[1] - steps[0]) < 10


@given(
    pipeline=pipelines(uneven=2.0, sends=1.5),
    groups=st.integers(1, 30),
    v=st.integers(1, 4),
    hidden=st.floats(0, 1),
    overlap=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_merged_passes_are_exact_whatever_hides_in_them(
    pipeline: tuple[Times, int], groups: int, v: int, hidden: float, overlap: bool
) -> None:
    t = pipeline[0]
    times = Times.of(t.forward, t.backward, 0.0, t.send, hidden=hidden * t.forward)
    closed, simulated = both("merged_1f1b", times, len(t.forward) * groups, v, overlap=overlap)
    assert closed == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize(("p", "m", "v"), [(2, 2, 1), (4, 9, 1), (4, 3, 1), (2, 6, 2), (4, 16, 3)])
def test_equal_stages_of_merged_passes_save_in_all_pairs_of_the_last_one(
    p: int, m: int, v: int
) -> None:
    times = Times.of([1.0] * p, [2.0] * p, hidden=0.75)
    pairs = m * v - (v - 1) * p - 1
    wanted = 3 * p + pairs * 2.25 / v
    assert both("merged_1f1b", times, m, v) == pytest.approx((wanted, wanted), rel=1e-12)
    if v == 1:
        assert both("1f1b", times, m)[0] - wanted == pytest.approx(0.75 * pairs)


@given(pipeline=pipelines(uneven=0.0, sends=0.3), groups=st.integers(1, 5), v=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_interleaving_is_exact_for_equal_stages_whose_sends_are_short(
    pipeline: tuple[Times, int], groups: int, v: int
) -> None:
    times = Times.of(pipeline[0].forward, pipeline[0].backward, 0.0, pipeline[0].send / v)
    closed, simulated = both("interleaved", times, len(times.forward) * groups, v)
    assert closed == pytest.approx(simulated, rel=1e-12)


@given(
    st.integers(2, 8), st.integers(1, 6), st.integers(2, 5), st.floats(0, 0.3), st.floats(0, 0.3)
)
@settings(max_examples=40, deadline=None)
def test_interleaving_is_exact_where_the_embedding_and_the_head_lengthen_the_ends(
    p: int, groups: int, v: int, first: float, last: float
) -> None:
    forward = np.ones(p)
    forward[0] += first
    forward[-1] += last
    closed, simulated = both(
        "interleaved", Times.of(forward, 2 * forward, 0.0, 0.1 / v), p * groups, v
    )
    assert closed == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize(("overlap", "mean", "most"), [(True, 0.0003, 0.01), (False, 0.004, 0.03)])
def test_the_error_of_interleaving_with_unequal_stages_is_as_documented(
    overlap: bool, mean: float, most: float
) -> None:
    random = np.random.default_rng(0)
    errors = []
    for _ in range(120):
        p = int(random.integers(2, 9))
        v = int(random.integers(2, 5))
        times = Times.of(
            1 + 0.3 * random.random(p), 2 + 0.6 * random.random(p), 0.0, 0.3 / v * random.random(p)
        )
        closed, simulated = both(
            "interleaved", times, p * int(random.integers(1, 6)), v, overlap=overlap
        )
        errors.append(abs(closed / simulated - 1))
    assert np.mean(errors) < mean
    assert max(errors) < most


def _check_times(run: PipelineRun, times: Times, v: int) -> None:
    """Every pass once, no two at once on a stage, and none before its input."""
    p = len(times.forward)
    ends: dict[tuple[Word, int | None, int], float] = {}
    length = {
        FORWARD: times.forward,
        WEIGHT: times.weight,
        BACKWARD: times.backward,
        INPUT: times.backward - times.weight,
    }
    passes = [[t for t in done if t.action.word in PASSES] for done in run.stages]
    for stage, timed in enumerate(passes):
        for before, after in pairwise(timed):
            assert after.start >= before.end - 1e-12
        for t in timed:
            key = (
                BACKWARD if t.action.word is INPUT else t.action.word,
                t.action.micro_batch,
                t.action.chunk,
            )
            assert key not in ends and t.action.chunk % p == stage
            ends[key] = t.end
            assert t.end - t.start == pytest.approx(length[t.action.word][stage] / v)
    for t in (t for timed in passes for t in timed):
        word = t.action.word
        k = t.action.micro_batch
        chunk = t.action.chunk
        if word is FORWARD and chunk:
            assert t.start >= ends[FORWARD, k, chunk - 1] + times.send[(chunk - 1) % p] - 1e-12
        elif word in (BACKWARD, INPUT) and chunk < p * v - 1:
            assert t.start >= ends[BACKWARD, k, chunk + 1] + times.send[chunk % p] - 1e-12
        elif word is not FORWARD:
            assert t.start >= ends[BACKWARD if word is WEIGHT else FORWARD, k, chunk] - 1e-12


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_simulated_step_runs_every_pass_after_its_input(name: str) -> None:
    row = SCHEDULES[name]
    v = 2 if row.chunks else 1
    times = Times.of(
        [1.0, 1.5, 1.25, 1.0],
        [2.0, 2.5, 2.0, 3.0],
        0.5 if row.splits else 0.0,
        [0.25, 0.5, 0.25, 0.125],
    )
    run = run_of(name, times, 8, v)
    passes = [sum(t.action.word in PASSES for t in stage) for stage in run.stages]
    assert passes == [8 * v * (3 if row.splits else 2)] * 4
    _check_times(run, times, v)
    work = 8 * (times.forward + times.backward)
    assert run.idle == pytest.approx(run.seconds - work)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("weight", [0.0, 0.25, 0.5])
def test_the_bubble_of_equal_stages_is_the_one_that_is_planned_with(
    name: str, weight: float
) -> None:
    """A step is m passes and the bubble; `weight`: seconds of three for gradients of weights."""
    row = SCHEDULES[name]
    for p, v in ((2, 1), (4, 1), (4, 2), (6, 3)):
        if v == 1 or row.chunks:
            run = run_of(name, Times.of([1.0] * p, [2.0] * p, weight), 2 * p, v)
            assert run.seconds == pytest.approx(
                3 * (2 * p + row.bubble(p, weight / 3, v)), rel=1e-12
            )


IN_FLIGHT = {
    "gpipe": lambda s, p, m, v: m,
    "1f1b": lambda s, p, m, v: min(m, p - s),
    "interleaved": lambda s, p, m, v: min(2 * (p - 1 - s) + (v - 1) * p + 1, m * v),
    "merged_1f1b": lambda s, p, m, v: min(2 * (p - 1 - s) + (v - 1) * p + 2, m * v),
    "zero_bubble": lambda s, p, m, v: min(m, p),
}
"""Chunk passes in flight on stage s of p, as published; every schedule has a row."""


@pytest.mark.parametrize("name", IN_FLIGHT)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (3, 2), (4, 4), (4, 12), (8, 16), (5, 3)])
def test_micro_batches_in_flight_are_those_of_the_order(name: str, p: int, m: int) -> None:
    row = SCHEDULES[name]
    frees = WEIGHT if row.splits else BACKWARD
    for v in (1, 2, 3) if row.chunks else (1,):
        m = -(-m // p) * p if row.chunks else m
        if row.refusal(p, m, v):
            continue
        for s in range(p):
            held = peak = 0
            for action in one_by_one(row.order(s, p, m, v)):
                held += (action.word is FORWARD) - (action.word is frees)
                peak = max(peak, held)
            assert held == 0
            assert in_flight(name, s, p, m, v) * v == peak == IN_FLIGHT[name](s, p, m, v)


@given(p=st.integers(1, 6), groups=st.integers(1, 3), v=st.integers(1, 3))
@settings(max_examples=30, deadline=None)
def test_every_order_makes_each_pass_of_each_chunk_once(p: int, groups: int, v: int) -> None:
    for row in SCHEDULES.values():
        chunks = v if row.chunks else 1
        m = groups * p
        for s in range(p):
            order = one_by_one(row.order(s, p, m, chunks))
            made = [(a.word, a.chunk, a.micro_batch) for a in order]
            words = (FORWARD, INPUT, WEIGHT) if row.splits else (FORWARD, BACKWARD)
            assert sorted(made) == sorted(
                (w, c * p + s, k) for w in words for c in range(chunks) for k in range(m)
            )


def test_micro_batches_in_flight_of_the_papers() -> None:
    assert [in_flight("1f1b", s, 4, 16) for s in range(4)] == [4, 3, 2, 1]
    assert in_flight("gpipe", 2, 4, 16) == 16
    assert [in_flight("zero_bubble", s, 4, 16) for s in range(4)] == [4] * 4
    for p, v in ((8, 2), (35, 3), (8, 3)):  # Megatron's p (1 + (p - 1) / (p v)) of the first stage
        assert in_flight("interleaved", 0, p, 8 * p, v) == pytest.approx(
            p * (1 + (p - 1) / (p * v))
        )


def test_1f1b_keeps_least_in_flight() -> None:
    assert {thriftiest(p, m).name for p in (1, 2, 8) for m in (1, 4, 32)} == {"1f1b"}


def test_sends_that_are_not_hidden_cost_two_on_every_pass_of_a_middle_stage() -> None:
    p = 4
    m = 32
    e = 0.1
    times = Times.of([1.0] * p, [2.0] * p, 0.0, e)
    blocked = (
        2 * e * (m - 2) + 2 * e + e * (2 * p - 3)
    )  # the first and the last stage send half as much
    assert both("1f1b", times, m, overlap=False)[0] == pytest.approx((m + p - 1) * 3 + blocked)
    assert both("1f1b", times, m)[0] == pytest.approx(
        (m + p - 1) * 3 + 2 * e * (p - 1 + m - 1 - -(-(m - 1) // p))
    )


def test_one_stage_is_no_pipeline() -> None:
    for name in SCHEDULES:
        assert both(name, Times.of([1.0], [2.0], 0.5, 9.0), 5) == (15.0, 15.0)


def test_groups_of_an_interleaved_schedule_pass_through_chunk_after_chunk() -> None:
    first = SCHEDULES["interleaved"].order(0, 2, 4, 2)
    assert " ".join(str(a) for a in first if a.word is FORWARD) == "0F0 0F1 2F0 2F1 0F2 0F3 2F2 2F3"
    assert (
        " ".join(str(a) for a in first if a.word is BACKWARD) == "2B0 2B1 0B0 0B1 2B2 2B3 0B2 0B3"
    )


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "words"),
    [
        ("ib", 2, 4, 1, "1f1b"),
        ("1f1b", 2, 4, 2, "one model chunk a stage, not 2; possible: interleaved"),
        ("interleaved", 4, 6, 2, "no multiple of 4"),
        ("gpipe", 2, 0, 1, "at least 1"),
        ("merged_1f1b", 2, 1, 1, "one micro-batch has no other one"),
        ("merged_1f1b", 4, 6, 2, "no multiple of 4"),
    ],
)
def test_what_no_schedule_can_run_is_an_error(
    name: str, p: int, m: int, v: int, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        step_seconds(name, Times.of([1.0] * p, [1.0] * p), m, v)


@pytest.mark.parametrize(
    "bad",
    [
        ([], [], 0.0, 0.0),
        ([1.0], [1.0, 2.0], 0.0, 0.0),
        ([1.0], [1.0], 2.0, 0.0),
        ([1.0], [1.0], 0.0, -1.0),
    ],
)
def test_times_that_no_pipeline_has_are_an_error(
    bad: tuple[list[float], list[float], float, float],
) -> None:
    with pytest.raises(UsageError, match="for each stage"):
        step_seconds("1f1b", Times.of(*bad), 4)


def test_no_more_hides_than_there_is() -> None:
    with pytest.raises(UsageError, match="no more hidden than both passes"):
        Times.of([1.0], [1.0], hidden=2.5)


def test_a_stage_outside_the_pipeline_is_an_error() -> None:
    with pytest.raises(UsageError, match="numbered from 0"):
        in_flight("1f1b", 4, 4, 8)


def test_the_table_lists_the_oldest_first_and_holds_no_name_twice() -> None:
    assert list(SCHEDULES) == ["gpipe", "1f1b", "interleaved", "merged_1f1b", "zero_bubble"]
    row = SCHEDULES["gpipe"]
    assert list(tabled([replace(row, name="b"), row, replace(row, name="a", year=2030)])) == [
        "b",
        "gpipe",
        "a",
    ]
    with pytest.raises(ValueError, match="two pipeline schedules are called 'gpipe'"):
        tabled([row, replace(row, year=2030)])
    assert len({row.preferred for row in SCHEDULES.values()}) == len(SCHEDULES)
    assert all(row.description and "arXiv" in row.source for row in SCHEDULES.values())
