"""Plans of a model on one mesh: the one found, the schemes known by name, and random feasible ones."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.pricing import MeshPrices
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.planner import Request, as_plan, evaluate, name_axes, search_plan
from autopar.schemes import AXIS_SCHEMES
from autopar.search import CostGraph
from autopar.search.costgraph import solution
from autopar.sharding.analysis import analyse
from autopar.tables import build_tables

SCHEMES = ("data", "zero3", "tensor", "megatron", "megatron-sp", "ulysses")
FEASIBLE = 1e30
"""Prices above it mark pairs of choices that exclude each other."""


def request(sizes: Sequence[int], *, train: bool) -> Request:
    """Planning for a mesh of these sizes on one cluster of GPUs."""
    cluster = load_cluster("dgx-h100").sized(math.prod(sizes))
    levels = bind_axes(cluster, tuple(sizes))
    assert levels is not None
    mesh = name_axes(cluster, tuple(sizes), levels)
    return Request(cluster=cluster, train=train, optimizer="adamw" if train else "none", mesh=mesh)


def plans(model: LoadedModel, wanted: Request, *, randoms: int, seed: int = 0) -> Iterator[tuple[str, Plan]]:
    """Named plans, each read back from the text of its file."""
    yield "found", _read_back(search_plan(model.graph, wanted))
    for name in SCHEMES:
        yield name, _read_back(search_plan(model.graph, replace(wanted, limits=AXIS_SCHEMES[name])))
    yield from random_plans(model, wanted, count=randoms, seed=seed)


def random_plans(model: LoadedModel, wanted: Request, *, count: int, seed: int = 0) -> Iterator[tuple[str, Plan]]:
    """Plans that choose every strategy, storage layout and fan-out layout by chance among what is possible together."""
    assert wanted.mesh is not None
    prices = MeshPrices(cluster=wanted.cluster, mesh=wanted.mesh)
    tables = build_tables(analyse(model.graph, train=wanted.train), prices, optimizer=wanted.optimizer)
    for number in range(seed, seed + count):
        choices = random_choices(tables.graph, random.Random(number))
        chance = solution(tables.graph, choices, lower_bound=0.0, method="chance")
        yield f"random{number}", _read_back(as_plan(evaluate(tables, chance), wanted, lower_bound=0.0))


def random_choices(graph: CostGraph, rng: random.Random) -> tuple[int, ...]:
    """One choice a variable, each possible beside those before it."""
    before: list[list[int]] = [[] for _ in graph.sizes]
    for first, second in graph.edges:
        before[max(first, second)].append(min(first, second))
    chosen: list[int] = []
    for variable, size in enumerate(graph.sizes):
        possible = [choice for choice in range(size) if all(_pair(graph, v, chosen[v], variable, choice) for v in before[variable])]
        chosen.append(rng.choice(possible))
    return tuple(chosen)


def _pair(graph: CostGraph, first: int, choice: int, second: int, other: int) -> bool:
    if (first, second) in graph.edges:
        return bool(graph.edges[first, second][choice, other] < FEASIBLE)
    return bool(graph.edges[second, first][other, choice] < FEASIBLE)


def _read_back(plan: Plan) -> Plan:
    return Plan.model_validate_json(plan.to_json())
