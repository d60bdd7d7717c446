"""Bounds that hold for all candidates of a mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from autopar.costmodel import Cluster, load_cluster
from autopar.planning.bounds import Bounds
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.groups import CandidateGroups
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

GRAPH = transformer(
    Shape(
        layers=2, hidden=256, heads=4, kv_heads=4, ffn=512, vocab=32768, sequence=512, dropout=False
    ),
    batch=64,
).graph
"""Two fifths of its arithmetic is one product, that over the vocabulary."""
FOLDED = FoldedModel(GRAPH, train=True)


def candidates(cluster: Cluster, stages: int) -> tuple[Bounds, list[Candidate]]:
    request = Request(cluster=cluster, stages=stages)
    groups = CandidateGroups(FOLDED, request).groups(cluster.devices)
    return Bounds(FOLDED, request), [one for few, _ in groups for one in few]


@pytest.mark.parametrize("stages", [4, 8])
def test_no_stage_is_shorter_than_the_longest_operator(stages: int) -> None:
    bounds, every = candidates(load_cluster("dgx-h100").sized(8), stages)
    alone = bounds.least_seconds(1)
    assert len(every) > 4
    for candidate in every:
        least = bounds.least_waiting(candidate)
        assert least > 0.39 * alone / candidate.mesh.devices


def test_the_longest_operator_is_no_longer_than_a_program() -> None:
    bounds, (candidate, *_) = candidates(load_cluster("dgx-h100").sized(4), 4)
    request = replace(bounds.request, micro_batches=candidate.micro_batches, zero=1)
    step = search_plan(GRAPH, request, folded=FOLDED).predicted.step
    assert 0.5 * step < bounds.least_waiting(candidate) <= step


def test_stages_on_shared_cores_have_no_longest_one() -> None:
    """While a stage waits, others have its cores, so that it is faster."""
    cluster = load_cluster("local-cpu").sized(8)
    crowded = replace(cluster, cores=0.5)
    (own, every), (shared, others) = (candidates(one, 8) for one in (cluster, crowded))
    for one, other in zip(every, others, strict=True):
        assert shared.least_waiting(other) < 0.5 * own.least_waiting(one)
