"""Bounds within the memory hold for programs of many strategies, near the best and far from it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.planning.model.counts import Counts
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.best_first import BestFirst
from autopar.planning.outer_search.bound_within import loosest, surely
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.programs.priced_program import PricedProgram, evaluate
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode
from autopar.planning.tables.requested import requested_tables
from autopar.planning.tables.tables import Floats, Tables
from autopar.search import Infeasible, NoAssignment, solve
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SMALL: dict[str, Any] = {
    "layers": 2,
    "hidden": 512,
    "heads": 8,
    "kv_heads": 8,
    "ffn": 2048,
    "vocab": 4096,
    "sequence": 256,
    "dropout": False,
}
NOISES = (0.0, 0.1, 0.5)
SHARES = (1.0, 0.8, 0.6, 0.45, 0.3)


def some(tables: Tables, seed: int) -> Iterator[tuple[int, ...]]:
    """Assignments that are best where the tables are others by some noise, within several limits of
    memory.
    """
    rng = np.random.default_rng(seed)
    most = solve(tables.graph).memory

    def noisy(table: Floats, noise: float) -> Floats:
        return np.asarray(table * np.exp(noise * rng.standard_normal(table.shape)))

    for noise in NOISES:
        graph = tables.graph
        other = replace(
            graph,
            unary=tuple(noisy(table, noise) for table in graph.unary),
            edges={pair: noisy(table, noise) for pair, table in sorted(graph.edges.items())},
        )
        for share in SHARES:
            try:
                yield solve(other, method="lagrangian", memory_limit=share * most).choices
            except (Infeasible, NoAssignment):
                continue


def programs(
    solver: CandidateSolver, folded: FoldedModel, candidate: Candidate, mode: Mode, seed: int
) -> Iterator[tuple[PricedProgram, float]]:
    """Programs of a candidate, each with the bytes that its own tables surely count."""
    analysis = folded.analysis(short=False, micro_batches=candidate.micro_batches)
    prices = folded.prices(candidate.cluster, candidate.mesh, 1)
    tables = requested_tables(
        solver.request,
        analysis,
        prices,
        solver.work(candidate, mode, Counts(), short=False),
        whole=False,
    )
    loose = loosest(solver, candidate, mode).graph
    schedule = solver.schedule(mode, candidate.micro_batches, [prices], short=False)
    for choices in dict.fromkeys(some(tables, seed)):
        evaluated = evaluate(tables, replace(solve(tables.graph), choices=choices), schedule)
        yield evaluated, solver.always + loose.memory_of(choices)


@pytest.mark.parametrize("cluster", ["dgx-h100", "local-cpu"])
@pytest.mark.parametrize(("shape", "count"), [((4,), 1), ((2, 2), 1), ((4,), 4), ((2, 2), 2)])
def test_no_program_within_the_memory_undercuts_the_bound(
    cluster: str, shape: tuple[int, ...], count: int
) -> None:
    devices = load_cluster(cluster).sized(4)
    folded = FoldedModel(transformer(Shape(**SMALL), batch=16).graph, train=True, folded=False)
    mesh = next(mesh for mesh in meshes(devices) if mesh.shape == shape)
    candidate = Candidate(cluster=devices, stages=1, mesh=mesh, micro_batches=count)
    solver = CandidateSolver(folded, Request(cluster=devices))
    made: list[tuple[float, float]] = []
    for number, mode in enumerate(solver.modes()):
        for evaluated, counted in programs(solver, folded, candidate, mode, number):
            assert evaluated.memory >= counted * (1 - 1e-9), (mode, evaluated.memory, counted)
            made.append((evaluated.memory, evaluated.seconds))
    front = [
        (memory, seconds)
        for memory, seconds in made
        if seconds == min(s for m, s in made if m <= memory)
    ]
    assert len(made) >= 6 and len(set(front)) >= 2
    least = min(seconds for _, seconds in made)
    assert (
        0.7 * least
        < solver.bounds.base_seconds(devices.devices, 1, mesh, count)
        <= least * (1 + 1e-9)
    )
    ratios = []
    for memory, seconds in set(front):
        bound = surely(
            CandidateSolver(folded, Request(cluster=devices, memory=memory)),
            candidate,
            0.0,
            math.inf,
        )
        assert bound <= seconds * (1 + 1e-9), memory
        ratios.append(bound / seconds)
    assert max(ratios) > 0.7, "a bound of nothing would always hold"


def test_the_bound_within_the_memory_is_above_the_one_without() -> None:
    devices = load_cluster("dgx-h100").sized(4)
    folded = FoldedModel(transformer(Shape(**SMALL), batch=16).graph, train=True)
    free = BestFirst(folded, Request(cluster=devices, stages=1, micro_batches=1))
    free.run()
    best = free.incumbents.played[0].solved
    short = Request(
        cluster=devices, stages=1, micro_batches=1, memory=0.5 * best.solution.memory, fewer=False
    )
    solver = CandidateSolver(folded, short)
    candidate = best.candidate
    assert surely(solver, candidate, 0.0, math.inf) > 1.05 * solver.bounds.proven(candidate)


def test_what_surely_fits_has_parameters_alone() -> None:
    """Plain SGD keeps parameters and gradients.

    Without these a shard is its part of the parameter.
    """
    folded = FoldedModel(transformer(Shape(**SMALL), batch=16).graph, train=True)
    devices = load_cluster("dgx-h100").sized(4)
    candidate = Candidate(cluster=devices, stages=1, mesh=meshes(devices)[0], micro_batches=1)
    solver = CandidateSolver(
        folded, Request(cluster=devices, optimizer="sgd", zero=3, recompute="none")
    )
    tables = loosest(solver, candidate, next(solver.modes()))
    tensors = folded.folding.graph.tensors
    memory = tables.graph.memory or ()
    for variable, held in zip(tables.variables, memory, strict=True):
        if variable.what == "parameter":
            shards = tables.spaces[variable.name].divisors()[variable.rows]
            assert held == pytest.approx(
                tables.counts.get(variable.name, 1) * tensors[variable.name].bytes / shards
            )
