"""The fastest program of a front within a memory, and what is priced for it."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.programs.front import FAR, Front, Priced, Step
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode
from autopar.planning.tables.tables import Tables
from autopar.search import Infeasible, Solution, frontier


@pytest.fixture(scope="module")
def tables() -> Tables:
    """Tables of a small model, whose front has several solutions."""
    shape = Shape(
        layers=2, hidden=128, heads=4, kv_heads=4, ffn=256, vocab=1024, sequence=64, dropout=False
    )
    cluster = load_cluster("rtx4090").sized(4)
    model = FoldedModel(transformer(shape, batch=8).graph, train=True)
    solver = CandidateSolver(model, Request(cluster=cluster))
    candidate = Candidate(cluster=cluster, stages=1, mesh=meshes(cluster, 1)[0], micro_batches=1)
    return solver.tables(solver.case(candidate, Mode(zero=1, recompute="none")))


class Pricing:
    """Prices solutions by factors on the seconds that their tables add up to.

    They need the bytes of their tables. What is priced is counted.
    """

    def __init__(
        self, limit: float, solutions: Sequence[Solution] = (), factors: Sequence[float] = ()
    ) -> None:
        self.limit = limit
        self.factors = dict(zip(solutions, factors, strict=False))
        self.asked: list[Solution] = []

    def free(self, tables: Tables, solution: Solution, below: float) -> Step:
        return Step(self.factors.get(solution, 1.0) * solution.cost, solution.memory)

    def within(self, tables: Tables, solution: Solution, below: float) -> Priced:
        self.asked.append(solution)
        step = self.free(tables, solution, below)
        seconds = step.seconds if step.memory <= self.limit else math.inf
        return Priced(solution=solution, seconds=seconds, memory=step.memory)


def test_where_tables_tell_the_step_one_program_is_priced(tables: Tables) -> None:
    pricing = Pricing(math.inf)
    front = Front(tables, pricing, math.inf)
    best = front.best()
    assert best is not None and best.solution == next(frontier(tables.graph))
    assert len(pricing.asked) == 1 and not front.tightened


def test_what_is_behind_a_misjudged_program_is_priced(tables: Tables) -> None:
    solutions = list(frontier(tables.graph))
    fitting, following = solutions[3:5]
    # All tables promise too little, those of the first four programs most.
    pricing = Pricing(fitting.memory, solutions, [1.3] * 4 + [1.15] * (len(solutions) - 4))
    best = Front(tables, pricing, fitting.memory).best()
    assert best is not None and best.solution.choices == following.choices


def test_programs_that_are_not_wanted_are_not_priced(tables: Tables) -> None:
    first = next(frontier(tables.graph))
    pricing = Pricing(math.inf, [first], [2.0])
    assert Front(tables, pricing, math.inf).best(below=first.cost) is None and not pricing.asked


def test_more_memory_is_slower_by_no_more_than_tables_misjudge(tables: Tables) -> None:
    solutions = list(frontier(tables.graph))
    rng = random.Random(7)
    for _ in range(20):
        factors = [rng.uniform(1.0, 1.3) for _ in solutions]
        steps = []
        for solution in reversed(solutions):
            front = Front(tables, Pricing(solution.memory, solutions, factors), solution.memory)
            front.taken = list(solutions)
            best = front.best()
            assert best is not None
            steps.append(best.seconds)
        # A program may be faster, beside its tables, than the ones before it by up to `FAR`.
        assert all(more <= FAR * less for less, more in itertools.pairwise(steps))


def test_what_does_not_fit_says_what_would_do(tables: Tables) -> None:
    *_, last = frontier(tables.graph)
    with pytest.raises(Infeasible) as refusal:
        Front(tables, Pricing(0.5 * last.memory), 0.5 * last.memory).best()
    assert refusal.value.minimum_memory >= last.memory
