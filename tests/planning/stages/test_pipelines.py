"""The cuts of a pipeline against all cuts there are, under limits of memory."""

from __future__ import annotations

import itertools
import math
from dataclasses import fields, replace

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.order.schedules import in_flight
from autopar.planning.space.schedules import schedules_for
from autopar.planning.stages.cutter import INSIDE, MOST, Cutter
from autopar.planning.stages.operator_costs import NUMBERS, OperatorCosts
from autopar.planning.stages.piece_costs import PieceCosts
from autopar.planning.stages.pieces import pieces_of
from autopar.planning.stages.stage import Place, Slower

MICRO_BATCHES = 8


def figures(rng: np.random.Generator, count: int) -> OperatorCosts:
    """Random figures of `count` operators, between any two of which the model may be cut."""
    drawn = {
        f.name: rng.integers(1, 10, count).astype(float)
        for f in fields(OperatorCosts)
        if f.name not in ("handed", *NUMBERS)
    }
    drawn["weight"] = drawn["backward"] / 2
    drawn["hidden"] = drawn["forward"] / 2
    # What is handed on falls and rises again, so that every second place is a cut.
    handed = np.where(np.arange(count + 1) % 2 == 1, 1.0, 2.0)
    return OperatorCosts(**drawn, handed=handed)


def cutter(f: OperatorCosts, stages: int, limit: float) -> Cutter:
    cluster = load_cluster("dgx-h100").sized(stages)
    places = [Place(cluster=cluster, start=s, count=1) for s in range(stages)]
    costs = PieceCosts([f] * stages, MICRO_BATCHES)
    return Cutter(costs, places, [limit] * stages, [math.inf] * stages)


def slowest(f: OperatorCosts, cuts: tuple[int, ...], limit: float) -> float:
    """Seconds of the slowest stage, infinite where one does not fit."""
    stages = len(cuts) - 1
    worst = 0.0
    for stage, (i, j) in enumerate(itertools.pairwise(cuts)):
        saved = np.concatenate(([0.0], np.cumsum(f.saved)))
        peak = max(saved[k + 1] + f.excess[k] for k in range(i, j)) - saved[i]
        last = (
            max(saved[k + 1] + f.excess[k] + f.flat[k + 1 : j].sum() for k in range(i, j))
            - saved[i]
        )
        flying = in_flight("1f1b", stage, stages, MICRO_BATCHES)
        if f.stored[i:j].sum() + max((flying - 1) * (saved[j] - saved[i]) + peak, last) > limit:
            return math.inf
        seconds = (
            MICRO_BATCHES * (f.forward[i:j].sum() + f.backward[i:j].sum())
            + f.once[i:j].sum()
            + f.update[i:j].sum()
        )
        worst = max(worst, float(seconds))
    return worst


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("limit", [math.inf, 150.0, 90.0, 60.0])
def test_the_slowest_stage_is_as_fast_as_it_can_be(stages: int, limit: float) -> None:
    rng = np.random.default_rng(stages)
    for _ in range(20):
        f = figures(rng, 15)
        # One operator far dearer than the rest: the stages that hold it take several times the
        # mean.
        f.forward[rng.integers(15)] *= rng.integers(1, 40)
        made = cutter(f, stages, limit)
        inner = made.pieces[1:-1].tolist()
        every = [(0, *chosen, 15) for chosen in itertools.combinations(inner, stages - 1)]
        best = min((slowest(f, cuts, limit) for cuts in every), default=math.inf)
        actual = made._even_cut("1f1b", 1)
        assert (actual is None) == (best == math.inf)
        if actual is not None:
            assert slowest(
                f, (0, *(stage.stop for stage in actual.stages)), limit
            ) == pytest.approx(best)


@pytest.mark.parametrize(
    ("handed", "stages", "cuts"),
    [
        ([0, 2, 1, 2, 1, 1, 2, 2, 1, 2, 0], 1, [2, 4, 5, 8]),
        ([0, 5, 5, 5, 5, 5, 0], 2, [2, 3, 4]),
        ([0, 9, 3, 3, 3, 3, 9, 0], 1, [2, 3, 4, 5]),
        ([0, 9, 3, 3, 3, 9, 2, 9, 2, 9, 0], 1, [2, 4, 6, 8]),
    ],
)
def test_a_model_is_cut_where_bytes_are_least_and_between_equal_ones_where_these_are_few(
    handed: list[float], stages: int, cuts: list[int]
) -> None:
    count = len(handed) - 1
    drawn = {f.name: np.ones(count) for f in fields(OperatorCosts) if f.name != "handed"}
    assert pieces_of(
        [OperatorCosts(**drawn, handed=np.array(handed, dtype=float))], stages
    ).tolist() == [0, *cuts, count]


@pytest.mark.parametrize("seed", range(10))
def test_two_stages_are_cut_where_the_step_is_shortest(seed: int) -> None:
    """Values are small at the ends of layers of four operators, and large in the middle of each."""
    ahead = np.array([1e10, 3e13, 1e13, 3e13] * 6 + [1e10])
    made = cutter(replace(figures(np.random.default_rng(seed), 24), handed=ahead), 2, math.inf)
    best = made.best([("1f1b", 1)])
    assert best is not None
    flying = made._flying("1f1b", 1)
    steps = [made._pipeline((0, k, 12), "1f1b", 1, flying).step for k in range(1, 12)]
    assert made.costs.count == 12 and best.step == min(steps)


@pytest.mark.parametrize("seed", range(20))
def test_cuts_inside_layers_gain_much_or_are_told(seed: int) -> None:
    """A pipeline of whole layers says what others would save, at most; they save 3 % or more."""
    f = figures(np.random.default_rng(seed), 16)
    free = cutter(f, 2, math.inf)
    layers = PieceCosts([f] * 2, MICRO_BATCHES, [range(4, 5), range(8, 9), range(12, 13)])
    limits = [math.inf] * 2
    made = Cutter(free.costs, free.places, limits, limits, blocks=layers)
    best = made.best([("1f1b", 1)])
    least = free.best([("1f1b", 1)])
    whole = Cutter(layers, free.places, limits, limits).best([("1f1b", 1)])
    assert best is not None and least is not None and whole is not None
    if best.step < whole.step:
        assert best.step <= (1 - INSIDE) * whole.step and best.inside == 0
    else:
        assert best.inside >= 1 - least.step / whole.step - 1e-9
        assert 0 <= best.inside <= max(INSIDE, MOST)


@pytest.mark.parametrize("seed", range(10, 20))
def test_more_schedules_are_not_slower(seed: int) -> None:
    """Even loads may hand on so much that one far behind is the fastest once its cuts shift."""
    ahead = np.array([1e10, 9e13, 3e13, 9e13] * 6 + [1e10])
    made = cutter(replace(figures(np.random.default_rng(seed), 24), handed=ahead), 2, math.inf)
    pairs = [("1f1b", 1), ("interleaved", 2), ("zero_bubble", 1), ("gpipe", 1)]
    best, *alone = (made.best(some) for some in (pairs, *([pair] for pair in pairs)))
    assert best is not None
    # Of schedules that are nearly as fast the first is taken.
    assert (1 - 1e-3) * best.step <= min(one.step for one in alone if one is not None)


@pytest.mark.parametrize(("pieces", "most"), [(4, 1), (7, 1), (8, 2), (11, 2), (12, 3), (16, 4)])
def test_every_chunk_of_a_stage_is_a_piece_of_the_model(pieces: int, most: int) -> None:
    actual = dict(sorted(schedules_for(4, 8, pieces=pieces)))
    assert actual["1f1b"] == 1 and actual.get("interleaved", 1) == most


@pytest.mark.parametrize("seed", range(10))
def test_what_is_too_slow_is_not_cut(seed: int) -> None:
    made = cutter(figures(np.random.default_rng(seed), 15), 3, math.inf)
    pairs = [("1f1b", 1), ("gpipe", 1), ("zero_bubble", 1)]
    best = made.best(pairs)
    assert best is not None
    beaten = made.best(pairs, best.step * 1.01)
    assert beaten is not None and beaten.step == best.step
    with pytest.raises(Slower) as slower:
        made.best(pairs, 0.1 * best.step)
    assert 0.1 * best.step <= slower.value.seconds <= best.step


def test_what_does_not_fit_is_told_from_what_is_too_slow() -> None:
    rng = np.random.default_rng(7)
    pairs = [("zero_bubble", 1), ("1f1b", 1)]
    seen = 0
    for _ in range(40):
        made = cutter(figures(rng, 15), 3, 75.0)
        if made.best(pairs) is None:
            seen += 1
            assert made.best(pairs, made.ideal("1f1b", 1)) is None
    assert seen


def test_schedules_that_lack_memory_may_be_faster() -> None:
    rng = np.random.default_rng(11)
    pairs = [("zero_bubble", 1), ("interleaved", 2), ("1f1b", 1)]
    seen: set[str] = set()
    for _ in range(40):
        drawn = figures(rng, 20)
        made = cutter(drawn, 4, 85.0)
        best = made.best(pairs)
        if best is None:
            continue
        lacking = made.lacking(pairs, best.step)
        assert all(made.best([pair]) is None for pair in lacking)
        # Without a limit nothing lacks memory.
        assert not cutter(drawn, 4, np.inf).lacking(pairs, best.step)
        # What neither lacks memory nor is slow by itself was the best.
        others = [pair for pair in pairs if pair not in lacking and made.ideal(*pair) < best.step]
        assert (best.schedule, best.interleave) in others
        seen |= {name for name, _ in lacking}
    assert seen
