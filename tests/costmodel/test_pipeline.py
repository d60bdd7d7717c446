"""Pipeline schedules: the published times and bubbles, closed forms against the simulation, and what stages hold."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.costmodel.pipeline import BACKWARD, FORWARD, SCHEDULES, WEIGHT, Times, actions, in_flight, pipeline_seconds
from autopar.costmodel.pipeline_simulation import PipelineRun, simulate
from autopar.errors import UsageError

EXACT = ("gpipe", "1f1b", "zero_bubble")
NUMBERS = [(1, 3), (2, 2), (2, 7), (3, 2), (4, 4), (4, 9), (5, 20), (8, 8), (8, 32)]


def both(name: str, times: Times, micro_batches: int, interleave: int = 1, *, overlap: bool = True) -> tuple[float, float]:
    """Seconds by the closed form and by the simulation."""
    run = simulate(name, times, micro_batches, interleave, overlap_sends=overlap)
    form = pipeline_seconds(name, times.forward, times.backward, times.weight, times.send, micro_batches, interleave, overlap_sends=overlap)
    return form, run.seconds


@pytest.mark.parametrize(("p", "m"), NUMBERS)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_equal_stages_take_m_plus_p_minus_1_passes(name: str, p: int, m: int) -> None:
    found = both(name, Times.of([1.25] * p, [2.5] * p), m)
    assert found == pytest.approx(((m + p - 1) * 3.75,) * 2, rel=1e-12)


@pytest.mark.parametrize(("p", "groups", "v"), [(4, 3, 1), (2, 1, 2), (2, 3, 4), (3, 2, 2), (4, 1, 3), (4, 4, 2), (8, 2, 3), (6, 5, 2)])
def test_interleaving_divides_the_bubble_by_the_chunks(p: int, groups: int, v: int) -> None:
    m = p * groups
    closed, simulated = both("interleaved", Times.of([1.0] * p, [2.0] * p), m, v)
    assert (closed - 3 * m) / (3 * m) == pytest.approx((p - 1) / (v * m), rel=1e-12)
    assert simulated == pytest.approx(closed, rel=1e-12)


@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (4, 12), (8, 16)])
def test_the_bubble_of_zero_bubble_is_the_published_one(p: int, m: int) -> None:
    """arXiv:2401.10241, table 1: (p - 1)(T_F + T_B - T_W), T_B without the weight gradient; a third of 1F1B's where all three are equal."""
    forward, inputs, weight = 1.0, 1.2, 0.9
    closed, simulated = both("zero_bubble", Times.of([forward] * p, [inputs + weight] * p, weight), m)
    assert closed - m * (forward + inputs + weight) == pytest.approx((p - 1) * (forward + inputs - weight), rel=1e-12)
    assert simulated == pytest.approx(closed, rel=1e-12)
    equal = Times.of([1.0] * p, [2.0] * p, 1.0)
    assert both("zero_bubble", equal, m)[1] - 3 * m == pytest.approx((both("1f1b", equal, m)[1] - 3 * m) / 3, rel=1e-12)


@st.composite
def pipelines(draw: st.DrawFn, uneven: float, sends: float) -> tuple[Times, int]:
    """Stages whose times differ by up to the factor 1 + `uneven`, with sends of up to `sends` of a forward pass."""
    p = draw(st.integers(2, 7))
    numbers = st.floats(0, 1)
    forward, backward, weight, send = (np.array(draw(st.lists(numbers, min_size=p, max_size=p))) for _ in range(4))
    longest = 2 + 2 * uneven * backward
    return Times.of(1 + uneven * forward, longest, longest * 0.6 * weight, sends * send), draw(st.integers(1, 24))


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("overlap", [True, False])
@given(found=pipelines(uneven=2.0, sends=1.5))
@settings(max_examples=60, deadline=None)
def test_closed_forms_are_exact_for_unequal_stages_and_sends(name: str, overlap: bool, found: tuple[Times, int]) -> None:
    closed, simulated = both(name, *found, overlap=overlap)
    assert closed == pytest.approx(simulated, rel=1e-12)


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("overlap", [True, False])
def test_many_micro_batches_are_extrapolated_by_the_exact_period(name: str, overlap: bool) -> None:
    times = Times.of([1.0, 1.25, 1.0, 0.75, 1.25], [2.0, 2.25, 2.0, 2.0, 2.25], 0.75, [0.125, 0.5, 0.25, 0.5, 0.0])
    for m in (200, 201, 202, 203):
        closed, simulated = both(name, times, m, overlap=overlap)
        assert closed == pytest.approx(simulated, rel=1e-12)


@given(found=pipelines(uneven=0.0, sends=0.3), groups=st.integers(1, 5), v=st.integers(2, 4))
@settings(max_examples=60, deadline=None)
def test_interleaving_is_exact_for_equal_stages_whose_sends_are_short(found: tuple[Times, int], groups: int, v: int) -> None:
    times = Times.of(found[0].forward, found[0].backward, 0.0, found[0].send / v)
    closed, simulated = both("interleaved", times, len(times.forward) * groups, v)
    assert closed == pytest.approx(simulated, rel=1e-12)


@given(st.integers(2, 8), st.integers(1, 6), st.integers(2, 5), st.floats(0, 0.3), st.floats(0, 0.3))
@settings(max_examples=40, deadline=None)
def test_interleaving_is_exact_where_the_embedding_and_the_head_lengthen_the_ends(
    p: int, groups: int, v: int, first: float, last: float
) -> None:
    forward = np.ones(p)
    forward[0] += first
    forward[-1] += last
    closed, simulated = both("interleaved", Times.of(forward, 2 * forward, 0.0, 0.1 / v), p * groups, v)
    assert closed == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize(("overlap", "mean", "most"), [(True, 0.0003, 0.01), (False, 0.004, 0.03)])
def test_the_error_of_interleaving_with_unequal_stages_is_as_documented(overlap: bool, mean: float, most: float) -> None:
    random = np.random.default_rng(0)
    errors = []
    for _ in range(120):
        p, v = int(random.integers(2, 9)), int(random.integers(2, 5))
        times = Times.of(1 + 0.3 * random.random(p), 2 + 0.6 * random.random(p), 0.0, 0.3 / v * random.random(p))
        closed, simulated = both("interleaved", times, p * int(random.integers(1, 6)), v, overlap=overlap)
        errors.append(abs(closed / simulated - 1))
    assert np.mean(errors) < mean
    assert max(errors) < most


def _check_order(run: PipelineRun, name: str, times: Times, v: int) -> None:
    """Every action once, no two at once on a stage, and none before its input."""
    p = len(times.forward)
    ends: dict[tuple[str, int, int], float] = {}
    for stage, timed in enumerate(run.stages):
        for before, after in pairwise(timed):
            assert after.start >= before.end - 1e-12
        for t in timed:
            key = (t.action.kind, t.action.micro_batch, t.action.chunk * p + stage)
            assert key not in ends
            ends[key] = t.end
            length = {FORWARD: times.forward, WEIGHT: times.weight, BACKWARD: times.backward}[t.action.kind][stage] / v
            if SCHEDULES[name].splits and t.action.kind == BACKWARD:
                length -= times.weight[stage]
            assert t.end - t.start == pytest.approx(length)
    for stage, timed in enumerate(run.stages):
        for t in timed:
            kind, k, place = t.action.kind, t.action.micro_batch, t.action.chunk * p + stage
            if kind == FORWARD and place:
                assert t.start >= ends[FORWARD, k, place - 1] + times.send[(place - 1) % p] - 1e-12
            elif kind == BACKWARD and place < p * v - 1:
                assert t.start >= ends[BACKWARD, k, place + 1] + times.send[place % p] - 1e-12
            elif kind != FORWARD:
                assert t.start >= ends[BACKWARD if kind == WEIGHT else FORWARD, k, place] - 1e-12


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_simulated_step_runs_every_action_after_its_input(name: str) -> None:
    v = 2 if name == "interleaved" else 1
    times = Times.of([1.0, 1.5, 1.25, 1.0], [2.0, 2.5, 2.0, 3.0], 0.5 if name == "zero_bubble" else 0.0, [0.25, 0.5, 0.25, 0.125])
    run = simulate(name, times, 8, v)
    kinds = 3 if name == "zero_bubble" else 2
    assert [len(stage) for stage in run.stages] == [8 * v * kinds] * 4
    _check_order(run, name, times, v)
    work = 8 * (times.forward + times.backward)
    assert run.idle == pytest.approx(run.seconds - work)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("p", "m"), [(1, 1), (2, 2), (3, 2), (4, 4), (4, 12), (8, 16), (5, 3)])
def test_micro_batches_in_flight_are_those_of_the_simulation(name: str, p: int, m: int) -> None:
    for v in (1, 2, 3) if name == "interleaved" else (1,):
        m = -(-m // p) * p if name == "interleaved" else m
        run = simulate(name, Times.of([1.0] * p, [2.0] * p, 0.75), m, v)
        assert [in_flight(name, s, p, m, v) * v for s in range(p)] == list(run.in_flight)
        assert all(max(chunks) <= total <= sum(chunks) for chunks, total in zip(run.in_flight_by_chunk, run.in_flight, strict=True))


def test_micro_batches_in_flight_of_the_papers() -> None:
    assert [in_flight("1f1b", s, 4, 16) for s in range(4)] == [4, 3, 2, 1]
    assert in_flight("gpipe", 2, 4, 16) == 16
    assert [in_flight("zero_bubble", s, 4, 16) for s in range(4)] == [4] * 4
    for p, v in ((8, 2), (35, 3), (8, 3)):  # Megatron's p (1 + (p - 1) / (p v)) of the first stage
        assert in_flight("interleaved", 0, p, 8 * p, v) == pytest.approx(p * (1 + (p - 1) / (p * v)))


def test_sends_that_are_not_hidden_cost_two_on_every_pass_of_a_middle_stage() -> None:
    p, m, e = 4, 32, 0.1
    times = Times.of([1.0] * p, [2.0] * p, 0.0, e)
    blocked = 2 * e * (m - 2) + 2 * e + e * (2 * p - 3)  # the first and the last stage send half as much
    assert both("1f1b", times, m, overlap=False)[0] == pytest.approx((m + p - 1) * 3 + blocked)
    assert both("1f1b", times, m)[0] == pytest.approx((m + p - 1) * 3 + 2 * e * (p - 1 + m - 1 - -(-(m - 1) // p)))


def test_one_stage_is_no_pipeline() -> None:
    for name in SCHEDULES:
        assert both(name, Times.of([1.0], [2.0], 0.5, 9.0), 5) == (15.0, 15.0)


def test_groups_of_an_interleaved_schedule_pass_through_chunk_after_chunk() -> None:
    first = actions("interleaved", 2, 4, 2)[0]
    forward = [(a.micro_batch, a.chunk) for a in first if a.kind == FORWARD]
    backward = [(a.micro_batch, a.chunk) for a in first if a.kind == BACKWARD]
    assert forward == [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    assert backward == [(0, 1), (1, 1), (0, 0), (1, 0), (2, 1), (3, 1), (2, 0), (3, 0)]


@pytest.mark.parametrize(
    ("name", "p", "m", "v", "words"),
    [
        ("ib", 2, 4, 1, "1f1b"),
        ("1f1b", 2, 4, 2, "one model chunk"),
        ("interleaved", 4, 6, 2, "no multiple of 4"),
        ("gpipe", 2, 0, 1, "at least 1"),
    ],
)
def test_what_no_schedule_can_run_is_an_error(name: str, p: int, m: int, v: int, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        pipeline_seconds(name, [1.0] * p, [1.0] * p, 0.0, 0.0, m, v)


@pytest.mark.parametrize("bad", [([], [], 0.0, 0.0), ([1.0], [1.0, 2.0], 0.0, 0.0), ([1.0], [1.0], 2.0, 0.0), ([1.0], [1.0], 0.0, -1.0)])
def test_times_that_no_pipeline_has_are_an_error(bad: tuple[list[float], list[float], float, float]) -> None:
    with pytest.raises(UsageError, match="for each stage"):
        pipeline_seconds("1f1b", *bad, 4)


def test_a_stage_outside_the_pipeline_is_an_error() -> None:
    with pytest.raises(UsageError, match="numbered from 0"):
        in_flight("1f1b", 4, 4, 8)
