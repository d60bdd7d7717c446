"""Models with shared experts, which compute while the rows of the others travel, on real ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.configured import load_any
from autopar.frontends.load import ModelOptions
from autopar.model import LoadedModel
from autopar.order.beside import works_before
from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from autopar.runtime.run import run_plan
from autopar.sharding.analysis import analyse
from tests.end_to_end.plans import request
from tests.end_to_end.small_types import small_configuration

pytest.importorskip("transformers")

CASES = {
    "qwen2_moe": [((2,), "e+t"), ((2,), "e+t:once"), ((2, 2), "e+t e+t"), ((2, 2), "e+t f")],
    "deepseek_v3": [((2,), "e+t"), ((2, 2), "e+t:once e+t:once")],
}
"""Kinds of models, with meshes and the options of their layers of experts there."""
SCHEDULES = [
    {},
    {"micro_batches": 2, "gathered": "per_pass", "accumulated": "shards"},
    {"unit_bytes": 2048},
    {"micro_batches": 2, "overlap_experts": True},
    {
        "micro_batches": 2,
        "overlap_experts": True,
        "gathered": "per_pass",
        "accumulated": "shards",
        "unit_bytes": 2048,
    },
]


@functools.cache
def _model(folder: Path, kind: str) -> LoadedModel:
    path = folder / kind
    path.mkdir()
    (path / "config.json").write_text(json.dumps(small_configuration(kind)))
    options = ModelOptions(batch=8, dims={"sequence": 16}, dtype="float32")
    return load_any(f"hf:{path}", options)


@pytest.fixture(name="folder", scope="module")
def folder_of_configurations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def _plan(model: LoadedModel, sizes: Sequence[int], option: str) -> Plan:
    """The plan in which all layers of experts take these options."""
    wanted = request(sizes, train=True, optimizer="sgd")
    assert wanted.mesh is not None
    names = [axis.name for axis in wanted.mesh.axes]
    pins = Pins(operators={"*experts/experts": dict(zip(names, option.split(), strict=True))})
    return search_plan(model.graph, replace(wanted, limits=pins))


def _layers(model: LoadedModel, plan: Plan) -> tuple[int, int, int]:
    """The layers of experts beside which others run, those apart from others, and all layers."""
    micro = plan.execution(analyse(model.graph, train=True)).micro
    works = [
        works_before(micro.program, segment.steps, segment.working) for segment in micro.segments
    ]
    return (
        sum(len(layers) for work in works for layers in work.values()),
        sum(len(segment.working) for segment in micro.segments),
        sum(op.kind == "autopar.experts" for op in model.graph.operators),
    )


def _checked(folder: Path, kind: str, sizes: Sequence[int], option: str, number: int) -> None:
    model = _model(folder, kind)
    plan = _plan(model, sizes, option)
    schedule = plan.schedule.model_copy(update=SCHEDULES[number])
    plan = plan.model_copy(update={"schedule": schedule})
    beside, apart, layers = _layers(model, plan)
    assert (apart if plan.schedule.overlap_experts else beside) == layers > 0
    report = run_plan(model, plan, check=True)
    assert report.ok, report.check


@pytest.mark.parametrize("number", [0, 3])
def test_one_device_is_equalled(folder: Path, number: int) -> None:
    _checked(folder, "qwen2_moe", (2,), "e+t", number)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("number", range(len(SCHEDULES)))
@pytest.mark.parametrize(
    ("kind", "sizes", "option"), [(kind, *case) for kind, cases in CASES.items() for case in cases]
)
def test_every_way_to_travel(
    folder: Path, kind: str, sizes: Sequence[int], option: str, number: int
) -> None:
    _checked(folder, kind, sizes, option, number)
