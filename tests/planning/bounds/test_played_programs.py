"""The books of bounds against every program that searches of drawn cases play."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.best_first import BestFirst
from autopar.planning.outer_search.evaluator import Played
from autopar.planning.outer_search.incumbents import Incumbents
from autopar.search import sharing_orders
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

SHARES = (1.0, 0.6, 0.4)
"""Parts of the memory that the fastest plan takes."""


def drawn(seed: int) -> tuple[Shape, int, int]:
    """A shape, its batch and a number of devices; every other shape has experts."""
    rng = np.random.default_rng(seed)
    shape = Shape(
        layers=int(rng.choice([2, 4])),
        hidden=int(rng.choice([256, 512])),
        heads=8,
        kv_heads=8,
        ffn=int(rng.choice([512, 2048])),
        vocab=int(rng.choice([1024, 16384])),
        sequence=int(rng.choice([64, 256])),
        experts=8 * (seed % 2),
        expert_ffn=512 * (seed % 2),
        dropout=False,
    )
    return shape, int(rng.choice([8, 16])), int(rng.choice([2, 4]))


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Played]]:
    """All programs that searches play."""
    programs: list[Played] = []
    note = Incumbents.note

    def noted(self: Incumbents, one: Played) -> None:
        programs.append(one)
        note(self, one)

    monkeypatch.setattr(Incumbents, "note", noted)
    yield programs


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed > 1 else ()) for seed in range(8)]
)
def test_no_program_is_faster_than_the_bound_of_its_candidate(
    seed: int, played: list[Played]
) -> None:
    shape, batch, devices = drawn(seed)
    folded = FoldedModel(transformer(shape, batch=batch).graph, train=True)
    cluster = load_cluster("dgx-h100").sized(devices)
    most = 0.0
    compared = 0
    for share in SHARES:
        memory = share * most if most else None
        search = BestFirst(folded, Request(cluster=cluster, memory=memory, gap=0.0))
        played.clear()
        with sharing_orders():
            search.run()
        if not search.incumbents:
            continue
        most = most or search.incumbents.programs[0].memory
        assert search.bound <= search.incumbents.best
        for one in played:
            candidate = one.solved.candidate
            # Meshes of more axes than the bounded ones are split off these at the end.
            if candidate in search.book.sure:
                sure = min(
                    book.sure.get(candidate, math.inf) for book in (search.book, search.hiding)
                )
                assert sure <= one.seconds * (1 + 1e-9), candidate
                compared += 1
    assert compared >= 3
