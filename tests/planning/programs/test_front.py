"""The solutions of a front, and how often they are priced."""

from __future__ import annotations

import math

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.programs.front import Front, Priced, remembered
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode
from autopar.planning.tables.tables import Tables
from autopar.search import Solution


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
    """Prices solutions as their tables say, and counts them."""

    def __init__(self) -> None:
        self.asked: list[Solution] = []

    def __call__(self, tables: Tables, solution: Solution, wanting: bool) -> Priced:
        self.asked.append(solution)
        return Priced(
            solution=solution, seconds=solution.cost, memory=solution.memory, free=solution.cost
        )


def test_equal_choices_are_priced_once(tables: Tables) -> None:
    pricing = Pricing()
    price = remembered(pricing)
    one, other = (Front(tables, price, math.inf).best() for _ in range(2))
    assert one == other and len(pricing.asked) == 1
