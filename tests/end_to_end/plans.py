"""Plans of a model on one mesh.

The one found, the schemes known by name, and random feasible ones.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.plan_parts import SchedulePlan, StagePlan
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.planning.programs.priced_program import evaluate
from autopar.planning.programs.writing import Certificate, as_plan
from autopar.planning.space.candidates import name_axes
from autopar.planning.tables.build import build_tables
from autopar.schemes import AXIS_SCHEMES
from autopar.search import CostGraph, solution
from autopar.sharding.analysis import analyse
from autopar.sharding.micro_batches import split_batch
from autopar.sharding.schedule import Schedule

SCHEMES = ("data", "zero3", "tensor", "megatron", "megatron-sp", "ulysses")
ZEROS = {
    "zero1": ("per_step", "whole"),
    "zero2": ("per_step", "shards"),
    "zero3": ("per_pass", "shards"),
}
FEASIBLE = 1e30
"""Prices above it mark pairs of choices that exclude each other."""


def request(
    sizes: Sequence[int],
    *,
    train: bool,
    optimizer: str = "adamw",
    stages: int | None = None,
    **options: Any,
) -> Request:
    """Planning for a mesh of these sizes, or stages of it, on one cluster of GPUs."""
    cluster = load_cluster("dgx-h100").sized((stages or 1) * math.prod(sizes))
    levels = bind_axes(cluster.sized(math.prod(sizes)), tuple(sizes))
    assert levels is not None
    mesh = name_axes(cluster, tuple(sizes), levels)
    return Request(
        cluster=cluster,
        train=train,
        optimizer=optimizer if train else "none",
        mesh=mesh,
        stages=stages,
        **options,
    )


def plans(
    model: LoadedModel, wanted: Request, *, randoms: int, seed: int = 0
) -> Iterator[tuple[str, Plan]]:
    """Named plans, each read back from the text of its file."""
    yield from NamedPlans(model, wanted).items()
    yield from random_plans(model, wanted, count=randoms, seed=seed)


class NamedPlans(Mapping[str, Plan]):
    """The plan found and those of the schemes; each is made when it is asked for, as is `random3`,
    the plan by chance of that number.
    """

    def __init__(self, model: LoadedModel, wanted: Request) -> None:
        self.model = model
        self.wanted = wanted
        self._made: dict[str, Plan] = {}

    def __getitem__(self, name: str) -> Plan:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Plan:
        if name.startswith("random"):
            ((_, plan),) = random_plans(
                self.model, self.wanted, count=1, seed=int(name.removeprefix("random"))
            )
            return plan
        wanted = self.wanted if name == "found" else replace(self.wanted, limits=AXIS_SCHEMES[name])
        return _read_back(search_plan(self.model.graph, wanted))

    def __iter__(self) -> Iterator[str]:
        return iter(("found", *SCHEMES))

    def __len__(self) -> int:
        return 1 + len(SCHEMES)


def random_plans(
    model: LoadedModel, wanted: Request, *, count: int, seed: int = 0
) -> Iterator[tuple[str, Plan]]:
    """Plans that choose every strategy, storage layout and fan-out layout by chance among what is
    possible together.
    """
    assert wanted.mesh is not None
    prices = MeshPrices(cluster=wanted.cluster, mesh=wanted.mesh)
    tables = build_tables(
        analyse(model.graph, train=wanted.train), prices, optimizer=wanted.optimizer
    )
    for number in range(seed, seed + count):
        choices = random_choices(tables.graph, random.Random(number))
        chance = solution(tables.graph, choices, lower_bound=0.0, method="chance")
        yield (
            f"random{number}",
            _read_back(
                as_plan(evaluate(tables, chance), wanted, certificate=Certificate(lower_bound=0.0))
            ),
        )


def by_chance(
    model: LoadedModel, sizes: Sequence[int], count: int, seeds: Iterable[int]
) -> Iterator[tuple[str, Plan]]:
    """Plans of a micro-batch in which everything is chosen by chance, the schedule too."""
    wanted = request(sizes, train=True)
    assert wanted.mesh is not None
    analysis = analyse(model.graph, train=True)
    tables = build_tables(
        split_batch(analysis, count),
        MeshPrices(cluster=wanted.cluster, mesh=wanted.mesh),
        optimizer="adamw",
    )
    names = [op.name for op in analysis.warm]
    for seed in seeds:
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(len(names)), 4))
        recompute = (
            (tuple(names[cuts[0] : cuts[1]]), tuple(names[cuts[2] : cuts[3]])) if seed % 2 else ()
        )
        gathered, accumulated = rng.choice(list(ZEROS.values()))
        schedule = Schedule(
            micro_batches=count, recompute=recompute, gathered=gathered, accumulated=accumulated
        )  # type: ignore[arg-type]
        chance = solution(
            tables.graph, random_choices(tables.graph, rng), lower_bound=0.0, method="chance"
        )
        actual = as_plan(
            evaluate(tables, chance, schedule),
            wanted,
            certificate=Certificate(lower_bound=0.0),
            analysis=analysis,
        )
        yield f"chance {seed} {schedule}", _read_back(actual)


def in_stages(model: LoadedModel, parts: Sequence[Plan], schedule: Mapping[str, Any]) -> Plan:
    """A pipeline whose chunks hold equal numbers of operators, each as the plan of its part has
    them, on the mesh of that.
    """
    interleave = schedule.get("interleave", 1)
    names = [op.name for op in analyse(model.graph, train=True).warm]
    starts = [number * len(names) // len(parts) for number in range(len(parts))]
    part_of = {name: parts[bisect.bisect_right(starts, at) - 1] for at, name in enumerate(names)}
    stages = len(parts) // interleave
    chunks = [
        StagePlan(
            first=names[start],
            mesh=parts[number % stages].mesh,
            forward=0.0,
            backward=0.0,
            memory=0.0,
        )
        for number, start in enumerate(starts)
    ]
    readers = {
        name: op.name
        for op in reversed(model.graph.operators)
        for name in op.inputs
        if op.name in part_of
    }
    makers = {name: op.name for op in model.graph.operators for name in op.outputs}
    chains: dict[
        str, dict[tuple[str, str], tuple[str, ...]]
    ] = {}  # of those that lead from one layout to another, one
    for part in parts:
        for name, steps in part.redistributions.items():
            for chain in steps:
                chains.setdefault(name, {}).setdefault((chain[0], chain[-1]), chain)
    made = parts[0].model_copy(
        update={
            "operators": {name: part.operators[name] for name, part in part_of.items()},
            "parameters": {
                n: part_of[readers[n]].parameters[n] if n in readers else p
                for n, p in parts[0].parameters.items()
            },
            "outputs": {
                n: (part_of[makers[n]] if makers.get(n) in part_of else parts[-1]).outputs[n]
                for n in parts[0].outputs
            },
            "redistributions": {name: tuple(steps.values()) for name, steps in chains.items()},
            "schedule": SchedulePlan.model_validate(schedule),
            "stages": tuple(chunks),
        }
    )
    return _read_back(made)


def random_choices(graph: CostGraph, rng: random.Random) -> tuple[int, ...]:
    """One choice a variable, each possible beside those before it."""
    before: list[list[int]] = [[] for _ in graph.sizes]
    for first, second in graph.edges:
        before[max(first, second)].append(min(first, second))
    chosen: list[int] = []
    for variable, size in enumerate(graph.sizes):
        possible = [
            choice
            for choice in range(size)
            if all(_pair(graph, v, chosen[v], variable, choice) for v in before[variable])
        ]
        chosen.append(rng.choice(possible))
    return tuple(chosen)


def _pair(graph: CostGraph, first: int, choice: int, second: int, other: int) -> bool:
    if (first, second) in graph.edges:
        return bool(graph.edges[first, second][choice, other] < FEASIBLE)
    return bool(graph.edges[second, first][other, choice] < FEASIBLE)


def _read_back(plan: Plan) -> Plan:
    return Plan.model_validate_json(plan.to_json())
