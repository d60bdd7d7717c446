"""The scores of predictions on small invented data, by hand and against scipy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.validating import scores
from benchmarks.validating.scores import Group, Sample, score

POSITIVE = st.floats(min_value=1e-3, max_value=1e3)


def test_errors_of_a_group_by_hand() -> None:
    samples = (
        Sample(label="a", measured=2.0, predicted=1.5),
        Sample(label="b", measured=10.0, predicted=11.0),
        Sample(label="c"),
    )
    scored = score(Group(name="g", samples=samples))
    assert scored.n == 2
    assert scored.mean_error == pytest.approx((0.25 + 0.1) / 2)
    assert scored.max_error == pytest.approx(0.25)
    assert scored.bias == pytest.approx((-0.25 + 0.1) / 2)
    assert scored.null_error is None, "without work there is no rate"
    assert (scored.spearman, scored.regret, scored.oom_accuracy, scored.memory_error) == (
        None,
        None,
        None,
        None,
    )


def test_null_model_by_hand() -> None:
    # Rates 1, 2 and 4: each row at the geometric mean of the two others, sqrt(8), 2 and sqrt(2).
    actual = scores.null_predictions([1.0, 2.0, 4.0], [1.0, 1.0, 1.0])
    assert actual == pytest.approx([1 / math.sqrt(8), 1.0, 4 / math.sqrt(2)])


@given(st.lists(POSITIVE, min_size=2, max_size=8), POSITIVE)
def test_null_model_is_right_at_a_constant_rate_and_knows_no_unit(
    seconds: list[float], rate: float
) -> None:
    measured = np.asarray(seconds)
    assert scores.null_predictions(measured * rate, measured) == pytest.approx(measured)
    uneven = np.arange(1.0, len(seconds) + 1)
    assert scores.null_predictions(uneven * rate, measured) == pytest.approx(
        scores.null_predictions(uneven, measured)
    )


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=2, max_size=12))
def test_rank_correlation_is_that_of_scipy(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    ours = [p for p, _ in pairs]
    theirs = [m for _, m in pairs]
    actual = scores.spearman(ours, theirs)
    if len(set(theirs)) == 1:
        assert actual is None
    elif len(set(ours)) == 1:
        assert actual == 0.0
    else:
        assert actual == pytest.approx(stats.spearmanr(ours, theirs).statistic, abs=1e-12)


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=12))
def test_regret_is_never_negative_and_none_for_the_truth(pairs: list[tuple[float, float]]) -> None:
    predicted = [p for p, _ in pairs]
    measured = [m for _, m in pairs]
    assert scores.regret(predicted, measured) >= 0.0
    assert scores.regret(measured, measured) == pytest.approx(0.0)
    assert scores.regret(predicted, measured) <= max(measured) / min(measured) - 1.0 + 1e-12


def test_equal_predictions_choose_by_lot() -> None:
    assert scores.regret([1.0, 1.0, 2.0], [1.0, 2.0, 9.0]) == pytest.approx(0.5)


def test_sweeps_are_ranked_each_by_itself() -> None:
    """Two sweeps, one ranked rightly and one inverted; together they would look well ranked."""
    first = [Sample(label=str(m), sweep="a", measured=m, predicted=m) for m in (1.0, 2.0, 3.0)]
    second = [
        Sample(label=str(m), sweep="b", measured=m, predicted=200.0 - m)
        for m in (100.0, 110.0, 130.0)
    ]
    short = [Sample(label=str(m), sweep="c", measured=m, predicted=1 / m) for m in (1.0, 2.0)]
    scored = score(Group(name="g", samples=(*first, *second, *short)))
    assert (scored.sweeps, scored.spearman, scored.worst_spearman) == (
        2,
        pytest.approx(0.0),
        pytest.approx(-1.0),
    )
    assert (scored.regret, scored.worst_regret) == (pytest.approx(0.15), pytest.approx(0.3))


def test_confusion_counts_each_kind() -> None:
    kinds = (
        [(True, True)] * 4
        + [(True, False)] * 3
        + [(False, True)] * 2
        + [(False, False)]
        + [(None, True), (True, None)]
    )
    scored = score(
        Group(name="g", samples=tuple(Sample(label="", told_oom=t, was_oom=w) for t, w in kinds))
    )
    assert scored.oom == (4, 3, 2, 1)
    assert scored.oom_accuracy == pytest.approx(0.5)


def test_without_a_row_out_of_memory_there_is_no_accuracy() -> None:
    scored = score(Group(name="g", samples=(Sample(label="", told_oom=False, was_oom=False),)))
    assert (scored.oom, scored.oom_accuracy, scored.chosen_oom) == (None, None, None)


def test_a_first_choice_that_ran_out_of_memory_is_counted() -> None:
    timed = [
        Sample(label="", sweep=s, measured=m, predicted=m, told_oom=False, was_oom=False)
        for s in "ab"
        for m in (2.0, 3.0, 4.0)
    ]
    lost = [
        Sample(label="told to fit", sweep="a", predicted=1.0, told_oom=False, was_oom=True),
        Sample(label="told not to", sweep="b", predicted=1.0, told_oom=True, was_oom=True),
    ]
    scored = score(Group(name="g", samples=(*timed, *lost)))
    assert (scored.sweeps, scored.chosen_oom, scored.regret) == (2, 1, 0.0)


def test_memory_is_compared_where_both_are_known() -> None:
    pairs = ((10.0, 12.0), (10.0, 9.0), (1.0, None))
    scored = score(
        Group(
            name="g",
            samples=tuple(Sample(label="", memory=was, told_memory=told) for was, told in pairs),
        )
    )
    assert (scored.memory_n, scored.memory_error, scored.memory_bias) == (
        2,
        pytest.approx(0.15),
        pytest.approx(0.05),
    )
