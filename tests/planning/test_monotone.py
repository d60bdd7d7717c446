"""More memory, more devices and fewer pins never make a plan slower, over small models drawn by chance; gaps are true, limits kept."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.errors import NoPlanFits, UsageError
from autopar.ir import Graph
from autopar.planning.planner import search_plan
from autopar.planning.request import Request

SLOWER = 1.005
"""By how much a plan may be slower that ought not to be: what a search leaves as not worth its time."""
PINS: tuple[dict[str, Any], ...] = ({"stages": 1}, {"stages": 2}, {"micro_batches": 1}, {"micro_batches": 2}, {"zero": 0}, {"zero": 3})


def drawn(seed: int) -> tuple[Graph, Request]:
    """A model, and the request for it without a limit that binds."""
    rng = random.Random(seed)
    heads, width = rng.choice([4, 8]), rng.choice([256, 512, 1024])
    shape = Shape(
        layers=rng.choice([2, 4]), hidden=width, heads=heads, kv_heads=heads, ffn=4 * width, vocab=rng.choice([1024, 8192]),
        sequence=rng.choice([64, 256]), dropout=False,
    )  # fmt: skip
    cluster = load_cluster(rng.choice(["dgx-h100", "local-cpu"])).sized(rng.choice([2, 4]))
    return transformer(shape, batch=rng.choice([4, 8, 16])).graph, Request(cluster=cluster, memory=1e15)


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
        fewer = search_plan(graph, replace(free, cluster=load_cluster(free.cluster.name).sized(devices)))
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
            steps.append(search_plan(graph, replace(free, memory=share * best.memory)).predicted.step)
        except NoPlanFits as error:
            search_plan(graph, replace(free, memory=1.001 * error.minimum))
            break
    assert all(before <= SLOWER * after for before, after in itertools.pairwise(steps))


CASES = 2000
SHARES = (1.1, 0.9, 0.7, 0.5)


def violation(seed: int) -> str:
    """What is wrong about one drawn case, empty if nothing is: a plan, and one that has less memory, fewer devices or one pin more."""
    rng = random.Random(1000 + seed)
    graph, free = drawn(seed)
    best = search_plan(graph, free)
    kind = rng.choice(["memory", "devices", "pin"])
    if kind == "memory":
        less = replace(free, memory=rng.choice(SHARES) * best.predicted.memory)
    elif kind == "devices":
        less = replace(free, cluster=load_cluster(free.cluster.name).sized(rng.choice([1, 2, free.cluster.devices])))
    else:
        less = replace(free, **rng.choice(PINS))
    try:
        other = search_plan(graph, less)
    except (NoPlanFits, UsageError):  # nothing fits so little, and so many stages or micro-batches there may not be
        return ""
    found = []
    for plan, request in ((best, free), (other, less)):
        bound = plan.provenance.lower_bound
        found += [f"gap {plan.provenance.gap}"] if plan.provenance.gap is None or plan.provenance.gap < 0 else []
        found += [f"memory {plan.predicted.memory} of {request.limit}"] if plan.predicted.memory > request.limit * (1 + 1e-9) else []
        found += [f"step below bound {bound}"] if plan.predicted.step < bound * (1 - 1e-9) else []
    if other.predicted.step < best.provenance.lower_bound * (1 - 1e-9):
        found.append(f"bound {best.provenance.lower_bound} beaten by {other.predicted.step}")
    if best.predicted.step > SLOWER * other.predicted.step:
        found.append(f"{best.predicted.step / other.predicted.step - 1:.2%} slower than with less")
    return f"{seed} {kind} {less.memory} {less.cluster.devices}: {'; '.join(found)}" if found else ""


@pytest.mark.slow
def test_two_thousand_cases() -> None:
    assert [said for seed in range(CASES) if (said := violation(seed))] == []
