"""How far stages reach, against trying every end; and the slowest stage by bisection, against the
tables of all stretches.
"""

from __future__ import annotations

import math
from dataclasses import fields

import numpy as np
import pytest

from autopar.planning.stages.operator_costs import OperatorCosts
from autopar.planning.stages.stage_memory import StageMemory
from autopar.search import interval_sums, least_worst, partition


def figures_of(rng: np.random.Generator, operators: int) -> OperatorCosts:
    drawn = {
        field.name: rng.integers(0, 9, operators).astype(np.float64)
        for field in fields(OperatorCosts)
        if field.name != "handed"
    }
    return OperatorCosts(**drawn, handed=np.zeros(operators + 1))


@pytest.mark.parametrize("seed", range(40))
def test_a_stage_reaches_as_far_as_its_memory_does(seed: int) -> None:
    rng = np.random.default_rng(seed)
    figures = figures_of(rng, 24)
    count = 9
    pieces = np.concatenate(
        ([0], np.sort(rng.choice(np.arange(1, 24), count - 1, replace=False)), [24])
    )
    memory = StageMemory(figures, pieces)
    flying = rng.integers(1, 5, 4).astype(float)
    limits = rng.uniform(10, 200, 4)
    hosts = rng.uniform(5, 60, 4)
    reach = memory.furthest(flying, limits, hosts)
    for stage in range(4):
        for start in range(count + 1):
            fits = [
                end
                for end in range(start + 1, count + 1)
                if memory.of(flying[stage], start, end)[0] <= limits[stage]
            ]
            fits = [end for end in fits if memory.host_of(start, end) <= hosts[stage]]
            assert reach[stage, start] == max(fits, default=start)
    near = memory.furthest(flying, limits, hosts, longest=3)
    assert np.array_equal(near, np.minimum(reach, np.arange(count + 1) + 3))
    anywhere = memory.furthest(flying, limits, np.full(4, math.inf))
    for stage, start in np.ndindex(anywhere.shape):
        assert memory.from_start(flying[stage], limits[stage], start) == anywhere[stage, start]


@pytest.mark.parametrize("seed", range(40))
def test_bisection_agrees_with_the_tables_of_all_stretches(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 10
    stages = int(rng.integers(1, 5))
    times = [rng.integers(1, 9, count).astype(float) for _ in range(stages)]
    reach = [
        np.minimum(
            np.maximum.accumulate(np.arange(count + 1) + rng.integers(1, 6, count + 1)), count
        )
        for _ in range(stages)
    ]
    starts = np.arange(count + 1)[:, None] - count + np.arange(count)
    fits = [row[np.maximum(starts, 0)] >= np.arange(count + 1)[:, None] for row in reach]
    tables = [
        np.where(fit, interval_sums(own), math.inf) for own, fit in zip(times, fits, strict=True)
    ]
    cuts = partition(tables)
    worst = least_worst([np.concatenate(([0.0], np.cumsum(own))) for own in times], reach)
    if cuts is not None:
        best = max(float(tables[s][cuts[s + 1], cuts[s] - cuts[s + 1]]) for s in range(stages))
        assert worst <= best * (1 + 1e-9)
    near = least_worst(
        [np.concatenate(([0.0], np.cumsum(own))) for own in times], reach, exact=1e-3
    )
    assert near == worst == math.inf or worst * (1 - 1e-9) <= near <= worst * (1 + 2e-3)
    if stages == 1 or worst == math.inf:
        assert (cuts is None) == (worst == math.inf)
