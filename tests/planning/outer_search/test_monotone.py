"""More memory, more devices and fewer pins never make a plan slower, over small models drawn by
chance; gaps are true, limits kept.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from autopar.costmodel import load_cluster
from autopar.errors import NoPlanFits, UsageError
from autopar.planning.planner import search_plan
from benchmarks.truths import KINDS, PINS, SLOWER, beaten, drawn, monotone, tried, untrue

SEEDS = [pytest.param(seed, marks=[pytest.mark.slow] if seed > 1 else []) for seed in range(12)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_limit_above_what_the_best_plan_needs_leaves_it(seed: int) -> None:
    graph, free = drawn(seed)
    best = search_plan(graph, free).predicted
    plan = search_plan(graph, replace(free, memory=1.02 * best.memory))
    assert plan.predicted.memory <= 1.02 * best.memory and plan.predicted.step <= SLOWER * best.step


@pytest.mark.parametrize("seed", SEEDS)
def test_more_devices_are_not_slower(seed: int) -> None:
    graph, free = drawn(seed)
    best = search_plan(graph, free).predicted.step
    for devices in (1, 2):
        fewer = search_plan(
            graph, replace(free, cluster=load_cluster(free.cluster.name).sized(devices))
        )
        assert best <= SLOWER * fewer.predicted.step


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_no_pin_makes_a_plan_faster(seed: int) -> None:
    graph, free = drawn(seed)
    best = search_plan(graph, free).predicted.step
    for pin in PINS:
        try:
            assert best <= SLOWER * search_plan(graph, replace(free, **pin)).predicted.step, pin
        except UsageError:  # so many stages or micro-batches there are not
            continue


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_less_memory_is_not_faster_and_the_least_is_the_least(seed: int) -> None:
    graph, free = drawn(seed)
    best = search_plan(graph, free).predicted
    steps = [best.step]
    for share in (0.8, 0.6, 0.4):
        try:
            steps.append(
                search_plan(graph, replace(free, memory=share * best.memory)).predicted.step
            )
        except NoPlanFits as error:
            search_plan(graph, replace(free, memory=1.001 * error.minimum))
            break
    assert all(before <= SLOWER * after for before, after in itertools.pairwise(steps))


CASES = 2000
TRIES = 200


@pytest.mark.slow
def test_two_thousand_cases() -> None:
    assert [(seed, said) for seed in range(CASES) if (said := monotone(seed).wrong)] == []


@pytest.mark.slow
def test_two_hundred_tries() -> None:
    assert [(seed, said) for seed in range(TRIES) if (said := tried(seed).wrong)] == []


@pytest.mark.parametrize("kind", ["monotone", "tries"])
def test_a_case_of_each_kind(kind: str) -> None:
    outcome = KINDS[kind](0)
    assert outcome.asked and not outcome.wrong


def test_what_is_wrong_is_said() -> None:
    """A plan whose bound is above its step, whose memory is above its limit."""
    graph, request = drawn(1)
    plan = search_plan(graph, request)
    lying = plan.model_copy(
        update={
            "provenance": plan.provenance.model_copy(
                update={"lower_bound": 2 * plan.predicted.step, "gap": -0.5}
            )
        }
    )
    assert len(untrue(lying, replace(request, memory=0.5 * plan.predicted.memory))) == 3
    assert beaten(lying, plan) and not beaten(plan, plan)
