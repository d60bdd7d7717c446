"""Bytes that are surely there at once, against cuts of drawn solutions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from autopar.costmodel import load_cluster
from autopar.planning.bounds.forced_recompute import least_used
from autopar.planning.model.counts import Counts
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.bound_within import once
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.evaluator import Evaluator
from autopar.planning.outer_search.whole_programs import WholePrograms
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode
from autopar.planning.stages.parts import Terms
from autopar.search import solve
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.planning.bounds.test_within import SMALL, some

CLUSTER = load_cluster("dgx-h100").sized(4)


def test_no_cut_takes_fewer_bytes_than_tables_in_which_no_gradient_counts_twice() -> None:
    folded = FoldedModel(transformer(Shape(**SMALL), batch=16).graph, train=True)
    solver = CandidateSolver(folded, Request(cluster=CLUSTER))
    mesh = meshes(CLUSTER, 2)[0]
    candidate = Candidate(cluster=CLUSTER, stages=2, mesh=mesh, micro_batches=4)
    least = dict[Mode, tuple[float, float]]()
    for mode in solver.modes():
        for held, counted, twice in _held(solver, candidate, mode):
            assert held >= least_used(mode.recompute) * counted * (1 - 1e-9), mode
            before = least.get(mode, (9.0, 9.0))
            least[mode] = (min(before[0], held / counted), min(before[1], counted / twice))
    for zero in (1, 2, 3):
        near, once = least[Mode(zero=zero, recompute="none")]
        assert near < 1.25 and (once < 0.97) == (zero == 1)


def _held(
    solver: CandidateSolver, candidate: Candidate, mode: Mode
) -> Iterator[tuple[float, float, float]]:
    """Bytes of both stages for drawn solutions and cuts, of tables, and of tables before.

    Both stages keep as many micro-batches in flight.
    """
    tables = WholePrograms(Evaluator(solver)).tables(candidate, mode, 0.0)
    work = replace(
        solver.work(candidate, mode, Counts(), short=False), counts=Counts(), in_flight=2.0
    )
    rng = np.random.default_rng(mode.zero)
    for choices in itertools.islice(dict.fromkeys(some(tables, mode.zero)), 6):
        terms = Terms(
            request=solver.request,
            schedule=solver.schedule(mode, candidate.micro_batches, [tables.prices], short=False),
            always=0.0,
        )
        solution = replace(solve(tables.graph), choices=choices)
        cutter, _ = terms.cutter([terms.part(solver.group(candidate), tables, solution)])
        cut = int(rng.integers(1, cutter.costs.count))
        ends = (0, cut, cutter.costs.count)
        held = sum(
            cutter.costs.stage(number, i, j, work.in_flight).memory
            for number, (i, j) in enumerate(itertools.pairwise(ends))
        )
        counted = once(tables, work)
        yield held, counted.graph.memory_of(choices), tables.graph.memory_of(choices)
