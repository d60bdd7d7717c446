"""Ranks that share the cores of one host: nothing is hidden, waiting costs only what the cores
stand still, and every price says so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.analysis.program.played_stages import stages_seconds
from autopar.costmodel import Cluster, dump, load_cluster
from autopar.costmodel.step.shared_cores import hides, shared_seconds
from autopar.errors import ClusterError
from autopar.ir import Graph
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.planning.stages.estimate import Pipe
from autopar.sharding.analysis import analyse
from autopar.sharding.mesh import Axis, Mesh
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer

OWN = load_cluster("local-cpu").sized(4)
HALF = replace(OWN, cores=0.5)
SHAPE = Shape(
    layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=1024, sequence=64, dropout=False
)


def graph() -> Graph:
    return transformer(SHAPE, batch=16, dtype="float32").graph


def request(cluster: Cluster, **more: Any) -> Request:
    return Request(cluster=cluster, **{"fewer": False, **more})


@pytest.mark.parametrize(
    ("cores", "seconds", "busy", "expected"),
    [
        (None, 7.0, [4.0, 4.0], 7.0),
        (2.0, 7.0, [4.0, 4.0], 7.0),
        (0.5, 7.0, [4.0, 2.0], 3.5),
        (0.5, 7.0, [4.0, 4.0], 4.0),
    ],
)
def test_a_step_is_bounded_by_the_work_and_by_a_core_of_its_own(
    cores: float | None, seconds: float, busy: list[float], expected: float
) -> None:
    assert shared_seconds(replace(OWN, cores=cores), seconds, busy) == expected


def test_fewer_ranks_have_more_of_the_cores() -> None:
    assert not hides(HALF) and hides(HALF.sized(2)) and HALF.sized(2).cores == 1.0
    assert HALF.sized(8).core_share == 0.25 and HALF.part(0, 2).core_share == 0.5, (
        "the ranks beside a part are at work as well"
    )


def test_a_cluster_file_keeps_the_cores(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(dump(HALF), encoding="utf-8")
    assert load_cluster(path) == HALF
    path.write_text(json.dumps({**json.loads(dump(HALF)), "cores": 0}), encoding="utf-8")
    with pytest.raises(ClusterError, match="cores"):
        load_cluster(path)


def test_a_bubble_is_work_of_others() -> None:
    def bubble(share: float) -> float:
        return Pipe(stages=4, micro_batches=4, weight=0.0, share=share).bubble("1f1b")

    assert (bubble(1.0), bubble(0.5)) == (3.0, 0.0)
    assert bubble(0.75) == pytest.approx(0.75 * 7 - 4)


def plans() -> Iterator[tuple[dict[str, Any], bool]]:
    yield {"stages": 1, "mesh": Mesh(axes=(Axis(name="rank", size=4, level="loopback"),))}, True
    yield {"stages": 4, "micro_batches": 4, "schedule": "1f1b"}, False


@pytest.mark.parametrize(("pins", "sends"), list(plans()))
def test_nothing_is_hidden_and_stages_wait_less(pins: dict[str, Any], sends: bool) -> None:
    own, half = (
        search_plan(graph(), request(cluster, zero=1, recompute="none", **pins))
        for cluster in (OWN, HALF)
    )
    assert half.predicted.overlapped == 0.0
    if sends:
        assert half.predicted.step >= own.predicted.step > 0.0
    else:
        assert 0.5 * own.predicted.step <= half.predicted.step < 0.9 * own.predicted.step
        assert stages_seconds(half, analyse(graph(), train=True), HALF) == pytest.approx(
            half.predicted.step, rel=1e-9
        )


def test_no_plan_undercuts_the_bound() -> None:
    plan = search_plan(graph(), request(HALF, fewer=True))
    assert plan.provenance.lower_bound is not None
    for stages in (1, 2, 4):
        pinned = search_plan(graph(), request(HALF, stages=stages))
        assert pinned.predicted.step >= plan.provenance.lower_bound * (1 - 1e-9)
        assert pinned.predicted.step >= plan.predicted.step * (1 - 5e-3)
