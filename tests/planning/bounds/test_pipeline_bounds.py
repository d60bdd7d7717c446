"""Bounds of pipelines against what schedules take of unequal stages, and against cuts of solved
candidates, within memory and without.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar.costmodel import load_cluster
from autopar.order.schedules import schedule_named, step_seconds
from autopar.order.times import Times
from autopar.planning.bounds.least_passes import ALL, NOTHING, UPDATES, least_passes
from autopar.planning.bounds.proof import Proof
from autopar.planning.bounds.with_stages import PipelineBounds
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.best_first import BestFirst
from autopar.planning.outer_search.book import Book
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.evaluator import Evaluator
from autopar.planning.outer_search.whole_programs import WholePrograms
from autopar.planning.solve.within_limits import solve_within
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.groups import CandidateGroups
from autopar.planning.space.modes import Mode
from autopar.planning.stages.estimate import Pipe
from autopar.planning.stages.parts import Terms
from autopar.planning.tables.parameters.traffic import Once, once_seconds
from autopar.search import Infeasible, NoAssignment
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

Floats = NDArray[np.float64]
WEIGHT = 1 / 3
SCHEDULES = [
    (stages, count, name, chunks)
    for stages, count in (
        (2, 2),
        (4, 4),
        (8, 8),
        (4, 16),
        (8, 16),
        (8, 4),
        (3, 5),
        (16, 32),
        (2, 1),
        (4, 1),
        (4, 5),
        (5, 20),
    )
    for name, chunks in (
        ("1f1b", 1),
        ("gpipe", 1),
        ("zero_bubble", 1),
        ("interleaved", 2),
        ("interleaved", 8),
        ("merged_1f1b", 1),
        ("merged_1f1b", 8),
    )
    if not schedule_named(name).refusal(stages, count, chunks)
]


def seconds(name: str, x: Floats, count: int, chunks: int, send: float | Floats = 0.0) -> float:
    return step_seconds(name, Times.of(x / 3, 2 * x / 3, WEIGHT * x, send), count, chunks)


def falling(
    first: Floats, name: str, count: int, chunks: int, rng: np.random.Generator
) -> Iterator[Floats]:
    """Stages of one sum, each time moved where the step gets shorter."""
    best = first
    least = seconds(name, first, count, chunks)
    for _ in range(60):
        other = np.maximum(best + rng.normal(0.0, 0.02 * best.mean(), len(best)), 0.0)
        other *= first.sum() / other.sum()
        if (taken := seconds(name, other, count, chunks)) < least:
            best = other
            least = taken
        yield other


@pytest.mark.parametrize(("stages", "count", "name", "chunks"), SCHEDULES)
def test_no_unequal_stages_take_fewer_passes(
    stages: int, count: int, name: str, chunks: int
) -> None:
    rng = np.random.default_rng(stages + count)
    pipe = Pipe(stages=stages, micro_batches=count, weight=WEIGHT)
    alone, updates, beside = (
        least_passes(pipe, name, chunks, sight) for sight in (NOTHING, UPDATES, ALL)
    )
    equal = seconds(name, np.ones(stages), count, chunks)
    near = 0.8 if schedule_named(name).merges else 0.9
    assert near * equal <= alone <= equal * (1 + 1e-9)
    for first in (np.ones(stages), rng.dirichlet(np.ones(stages))):
        for x in falling(first, name, count, chunks, rng):
            taken = seconds(name, x, count, chunks)
            assert stages * taken >= alone * float(x.sum()) * (1 - 1e-9)
            gather, reduce, update = (
                rng.dirichlet(np.ones(3 * stages)).reshape(3, -1)
                * rng.choice([0.1, 3.0, 30.0])
                * x.sum()
            )
            devices = [
                Once(
                    forward=f / 3,
                    backward=2 * f / 3,
                    gather=g,
                    reduce=r,
                    update=u,
                    gathered_in=int(rng.integers(1, 9)),
                    reduced_in=int(rng.integers(1, 9)),
                )
                for f, g, r, u in zip(x, gather, reduce, update, strict=True)
            ]
            step = taken + once_seconds(devices, "nccl", chunks)
            sent = float((gather + reduce).sum())
            updated = float(update.sum())
            assert (
                stages * step >= (beside * float(x.sum()) + sent + updated) * (1 - 1e-9)
                or beside <= 0
            )
            seen = (1 - UPDATES.hidden("nccl")) * sent
            assert (
                stages * step >= (updates * float(x.sum()) + seen + updated) * (1 - 1e-9)
                or updates <= 0
            )


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("stages", "count", "name", "chunks"), [row for row in SCHEDULES if row[0] <= 8]
)
@pytest.mark.parametrize("waited", [0.0, 1.0])
def test_linear_programs_find_no_fewer_passes(
    stages: int, count: int, name: str, chunks: int, waited: float
) -> None:
    """The least over all unequal stages, by planes that touch the closed form from below where it
    was looked at.
    """
    optimize = pytest.importorskip("scipy.optimize")
    rng = np.random.default_rng(0)
    behind = waited * np.arange(stages)[::-1] / (stages * chunks)

    def value(x: Floats) -> float:
        return seconds(name, x, count, chunks) - float(behind @ x)

    pipe = Pipe(stages=stages, micro_batches=count, weight=WEIGHT)
    known = least_passes(pipe, name, chunks, UPDATES if waited else NOTHING)
    planes = []
    x = np.full(stages, 1 / stages)
    best = math.inf
    for _ in range(60):
        near = np.maximum(x, 1e-3 / stages) * (1 + 1e-4 * rng.random(stages))
        slopes = np.array(
            [(value(near + 1e-9 * row) - value(near)) / 1e-9 for row in np.eye(stages)]
        )
        planes.append(slopes * value(near) / float(slopes @ near))
        best = min(best, value(x))
        table = np.hstack([np.array(planes), -np.ones((len(planes), 1))])
        bounds = [(0, None)] * stages + [(None, None)]
        sums = {"A_eq": [np.r_[np.ones(stages), 0.0]], "b_eq": [1.0]}
        solution = optimize.linprog(
            np.r_[np.zeros(stages), 1.0],
            A_ub=table,
            b_ub=np.zeros(len(planes)),
            bounds=bounds,
            **sums,
        )
        x = 0.7 * solution.x[:stages] + 0.3 * x
    assert known <= stages * min(best, value(x)) * (1 + 1e-4) or known <= 0


def shape(**more: int) -> Shape:
    sizes = {
        "layers": 6,
        "hidden": 512,
        "heads": 8,
        "kv_heads": 8,
        "ffn": 2048,
        "vocab": 8192,
        "sequence": 256,
    }
    return Shape(**{**sizes, **more}, dropout=False)


def cuts(solver: CandidateSolver, candidate: Candidate, mode: Mode) -> dict[tuple[str, int], float]:
    """The least step that some solutions in a mode come to under every schedule."""
    costs = dict[tuple[str, int], float]()
    programs = WholePrograms(Evaluator(solver))
    for hidden, share in itertools.product(
        (solver.hides(candidate, mode), 0.0), (math.inf, 1.5, 1.0, 0.7)
    ):
        try:
            tables = programs.tables(candidate, mode, hidden)
            solution = solve_within(tables, "dynamic_programming", share * solver.room(candidate))
        except (Infeasible, NoAssignment):
            continue
        schedule = solver.schedule(mode, candidate.micro_batches, [tables.prices], short=False)
        terms = Terms(request=solver.request, schedule=schedule, always=solver.always)
        part = terms.part(solver.group(candidate), tables, solution)
        cutter, pairs = terms.cutter([part])
        for pair in pairs:
            if (pipeline := cutter.cut(*pair)) is not None:
                costs[pair] = min(costs.get(pair, math.inf), pipeline.step)
    return costs


@pytest.mark.parametrize(
    ("layers", "devices", "memory"),
    [
        (4, 4, 2e8),
        pytest.param(6, 8, 1.2e8, marks=pytest.mark.slow),
        pytest.param(12, 16, 9e7, marks=pytest.mark.slow),
    ],
)
def test_no_cut_undercuts_what_is_proven(layers: int, devices: int, memory: float) -> None:
    """The bound of a candidate under each schedule is below all cuts of its solutions."""
    request = Request(cluster=load_cluster("dgx-h100").sized(devices), memory=memory)
    folded = FoldedModel(transformer(shape(layers=layers), batch=16).graph, train=True)
    solver = CandidateSolver(folded, request)
    bounds = PipelineBounds(solver.bounds)
    compared = 0
    groups = [
        few
        for few, _ in CandidateGroups(folded, request).groups(devices)
        if few and few[0].stages > 1
    ]
    for candidate in [few[len(few) // 2] for few in groups][:: 3 if layers == 4 else 1]:
        for mode in solver.modes():
            for schedule, step in cuts(solver, candidate, mode).items():
                bound = bounds.free(candidate, (schedule,), mode.recompute)
                assert bound <= step * (1 + 1e-9), (candidate, mode, schedule)
                compared += 1
    assert compared > 5


@pytest.mark.slow
@pytest.mark.ci
def test_what_is_proven_raises_the_bound_and_stays_below_the_best() -> None:
    request = Request(cluster=load_cluster("dgx-h100").sized(4), memory=5e7)
    folded = FoldedModel(transformer(shape(layers=2), batch=8).graph, train=True)
    search = BestFirst(folded, request)
    search.run()
    best = search.incumbents.best
    book = Book(search.solver)
    for few, every in CandidateGroups(folded, request).groups(4):
        book.enter(few or every)
        book.bound_mesh(few or every)
    before = dict(book.sure)
    sure = dict(before)
    looking = Proof(sure, search.solver.bounds)
    looking.raise_least(0.995 * best)
    assert min(before.values()) < min(sure.values()) <= best
    assert all(sure[candidate] >= bound for candidate, bound in before.items())
    for played in search.incumbents.played:
        if played.solved.candidate in sure:
            assert sure[played.solved.candidate] <= played.seconds * (1 + 1e-9)
