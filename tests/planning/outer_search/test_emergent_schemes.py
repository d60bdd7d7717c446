"""The plans that the search gives when nothing is pinned: the schemes that people know, each where
its time has come, and beaten by no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from autopar.costmodel import Cluster, load_cluster
from autopar.errors import AutoparError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.schemes import scheme_named, scheme_of
from autopar.schemes.known import SCHEMES
from autopar.schemes.pinning import pinned
from autopar.search import Infeasible, NoAssignment
from autopar.sharding.analysis import analyse
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

PLENTY = 1e15
MEDIUM: dict[str, Any] = {
    "layers": 4,
    "hidden": 1024,
    "heads": 16,
    "kv_heads": 16,
    "ffn": 4096,
    "vocab": 8192,
    "sequence": 1024,
    "dropout": False,
}
WIDE: dict[str, Any] = {**MEDIUM, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn": 32768}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model and a cluster on which a scheme is the best."""

    shape: dict[str, Any]
    batch: int
    devices: int = 8
    slower: float = 1.0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        """The devices, with the links between nodes as much slower."""
        cluster = load_cluster("dgx-h100").sized(self.devices)
        levels = (
            replace(level, bandwidth=level.bandwidth / self.slower)
            if level.name == "nic"
            else level
            for level in cluster.levels
        )
        return replace(cluster, levels=tuple(levels))


CASES = {
    # much work for few weights, an optimizer that costs next to nothing
    "data": Case(shape=MEDIUM, batch=256, more={"optimizer": "sgd"}),
    # the same with an optimizer whose work is worth dividing
    "zero1": Case(shape={**MEDIUM, "layers": 8, "hidden": 2048, "ffn": 8192}, batch=128),
    # long rows for each device, and no room for the gathered weights
    "zero3": Case(shape={**WIDE, "sequence": 32768}, batch=4, devices=4, more={"memory": 48.8e9}),
    # one short text through large products; its length divides by nothing
    "megatron": Case(
        shape={**WIDE, "layers": 24, "sequence": 1021}, batch=1, more={"memory": PLENTY}
    ),
    # and one that divides
    "megatron-sp": Case(
        shape={**WIDE, "layers": 24, "sequence": 2048}, batch=1, more={"memory": PLENTY}
    ),
    # one long text through small products
    "ulysses": Case(
        shape={**MEDIUM, "layers": 8, "sequence": 131072}, batch=1, more={"memory": PLENTY}
    ),
    # many weights, of which each token meets a few
    "expert": Case(
        shape={**MEDIUM, "layers": 8, "hidden": 2048, "ffn": 8192, "experts": 8},
        batch=64,
        more={"memory": PLENTY},
    ),
}


def searched(name: str) -> tuple[Graph, Request, Plan]:
    """The graph, the request and the plan of a case."""
    case = CASES[name]
    graph = transformer(Shape(**case.shape), batch=case.batch).graph
    request = Request(cluster=case.cluster, **case.more)
    return graph, request, search_plan(graph, request)


@pytest.mark.parametrize("name", CASES)
def test_the_search_lands_on_the_scheme(name: str) -> None:
    graph, _, actual = searched(name)
    scheme = scheme_of(actual, analyse(graph, train=True)).name
    # With one micro-batch no gradients are added up, so ZeRO 1 and 2 store the same.
    if scheme == "zero2" and actual.schedule.micro_batches == 1:
        scheme = "zero1"
    # What is no expert may be stored split over the ranks of experts.
    assert scheme.partition(" ")[0] == name


CHECKED = [
    pytest.param(
        name, marks=[pytest.mark.ci] if name in ("zero3", "megatron-sp", "ulysses") else []
    )
    for name in CASES
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CHECKED)
def test_no_pinned_scheme_is_faster(name: str) -> None:
    graph, request, actual = searched(name)
    analysis = analyse(graph, train=True)
    priced = 0
    for other in SCHEMES:
        try:
            rival = search_plan(
                graph, replace(pinned(request, scheme_named(other), analysis), uniform=True)
            )
        except (AutoparError, Infeasible, NoAssignment):
            continue
        priced += 1
        assert actual.predicted.step <= rival.predicted.step * (1 + 1e-9), other
    assert priced >= 3


def test_stages_across_slow_links_and_tensors_inside_nodes() -> None:
    """Four nodes, joined by links fifty times slower than usual: only the activations at the cuts
    travel between them.
    """
    case = Case(
        shape={**WIDE, "layers": 16, "sequence": 2048},
        batch=8,
        devices=32,
        slower=50.0,
        more={"memory": PLENTY},
    )
    graph = transformer(Shape(**case.shape), batch=case.batch).graph
    plan = search_plan(graph, Request(cluster=case.cluster, **case.more))
    named = scheme_of(plan, analyse(graph, train=True))
    assert len(plan.stages) == 4 * plan.schedule.interleave
    assert all(axis.level == "nvlink" for axis in plan.mesh) and plan.mesh_.devices == 8
    assert named.name.startswith("pipeline-") and named.has("megatron-sp")
