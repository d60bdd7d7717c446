"""The least seconds of messages between stages, against those of drawn cuts."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.planning.bounds.message_floor import message_floor
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.evaluator import Evaluator
from autopar.planning.outer_search.whole_programs import WholePrograms
from autopar.planning.space.candidates import Candidate, meshes
from autopar.planning.space.modes import Mode
from autopar.planning.stages.parts import Terms
from autopar.planning.stages.stage import message_seconds
from autopar.search import solve

from .test_within import SMALL, some


@pytest.mark.parametrize("devices", [4, 16])
def test_no_cuts_have_shorter_messages(devices: int) -> None:
    # Some of the stages of 16 devices lie in other nodes.
    cluster = load_cluster("dgx-h100").sized(devices)
    folded = FoldedModel(transformer(Shape(**{**SMALL, "layers": 6}), batch=16).graph, train=True)
    mesh = max(meshes(cluster, 4), key=lambda mesh: len(mesh.axes))
    candidate = Candidate(cluster=cluster, stages=4, mesh=mesh, micro_batches=4)
    solver = CandidateSolver(folded, Request(cluster=cluster))
    mode = Mode(zero=1, recompute="none")
    tables = WholePrograms(Evaluator(solver)).tables(candidate, mode, 0.0)
    rng = np.random.default_rng(devices)
    ratios = []
    for choices in itertools.islice(dict.fromkeys(some(tables, 0)), 6):
        terms = Terms(
            request=solver.request,
            schedule=solver.schedule(mode, candidate.micro_batches, [tables.prices], short=False),
            always=0.0,
        )
        solution = replace(solve(tables.graph), choices=choices)
        cutter, _ = terms.cutter([terms.part(solver.group(candidate), tables, solution)])
        pieces = cutter.pieces
        for chunks, _ in itertools.product((2, 3), range(20)):
            inside = rng.choice(len(pieces) - 2, 4 * chunks - 1, replace=False) + 1
            cuts = pieces[np.sort(inside)][: candidate.stages]
            handed = cutter.figures[0].handed[cuts]
            least = message_floor(folded, candidate, chunks)
            sent = message_seconds(cutter.places, handed.tolist())
            ratios += [one / floor for one, floor in zip(sent, least, strict=True)]
    # The fastest choices hand on no more than what no cut avoids.
    assert 1 - 1e-9 <= min(ratios) < 1.05
