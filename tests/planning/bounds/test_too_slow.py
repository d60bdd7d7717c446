"""Candidates left out as too slow within the memory are too slow; the others are solved."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.planning.bounds.too_slow import TooSlow
from autopar.planning.space.candidates import Candidate, meshes
from autopar.search import CostGraph, Infeasible, exhaustive

CLUSTER = load_cluster("dgx-h100").sized(8)
CANDIDATE = Candidate(cluster=CLUSTER, stages=1, mesh=meshes(CLUSTER)[0], micro_batches=1)


def drawn(seed: int) -> CostGraph:
    """A chain of five variables; what is fast takes much memory."""
    rng = np.random.default_rng(seed)
    seconds = tuple(np.sort(rng.uniform(1, 9, 4)) for _ in range(5))
    memory = tuple(np.sort(rng.uniform(1, 9, 4))[::-1].copy() for _ in range(5))
    edges = {(v, v + 1): rng.uniform(0, 2, (4, 4)) for v in range(4)}
    return CostGraph(sizes=(4,) * 5, unary=seconds, edges=edges, memory=memory)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_proven_too_slow_is(seed: int) -> None:
    graph = drawn(seed)
    slow = TooSlow()
    free = exhaustive(graph)
    for share in (0.9, 0.7, 0.5):
        try:
            best = exhaustive(graph, memory_limit=share * free.memory).cost
        except Infeasible:
            best = math.inf
        for below in (0.9 * free.cost, 1.02 * free.cost, 1.2 * free.cost, math.inf):
            if slow.proves(CANDIDATE, graph, share * free.memory, 0.5, 0.5 * below):
                assert best >= below * (1 - 1e-9)
            else:
                assert below > 0.9 * free.cost
