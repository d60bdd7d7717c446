"""Models with shared experts, which compute while the rows of the others travel, on real ranks."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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


STAGED = [
    ("qwen2_moe", (2,), "e+t", {"stages": 2, "micro_batches": 4, "interleave": 2}),
    ("qwen2_moe", (2,), "e+t", {"stages": 2, "micro_batches": 4, "zero": 3}),
    ("qwen2_moe", (2, 2), "e+t f", {"stages": 2, "micro_batches": 2}),
    ("deepseek_v3", (2, 2), "e+t:once e+t:once", {"stages": 2, "micro_batches": 2}),
    ("qwen2_moe", (2,), "e+t", {"stages": 4, "micro_batches": 4}),
]
"""Kinds of models in stages that merge passes: the mesh of a stage, its layers' options there."""


def _plan(model: LoadedModel, sizes: Sequence[int], option: str, **options: Any) -> Plan:
    """The plan in which all layers of experts take these options."""
    wanted = request(sizes, train=True, optimizer="sgd", **options)
    assert wanted.mesh is not None
    names = [axis.name for axis in wanted.mesh.axes]
    pins = Pins(operators={"*experts/experts": dict(zip(names, option.split(), strict=True))})
    return search_plan(model.graph, replace(wanted, limits=pins))


def _layers(model: LoadedModel, plan: Plan) -> tuple[int, int, int]:
    """The layers of experts beside which others run, those apart from others, and all layers."""
    chunks = plan.execution(analyse(model.graph, train=True)).chunks
    segments = [(chunk.micro.program, s) for chunk in chunks for s in chunk.micro.segments]
    works = [works_before(program, s.steps, s.working) for program, s in segments]
    return (
        sum(len(layers) for work in works for layers in work.values()),
        sum(len(segment.working) for _, segment in segments),
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


def _checked_in_stages(
    folder: Path,
    kind: str,
    sizes: Sequence[int],
    option: str,
    options: Mapping[str, int],
    backend: str | None = None,
) -> None:
    model = _model(folder, kind)
    plan = _plan(model, sizes, option, overlap_experts=True, **{"interleave": 1} | options)
    assert plan.schedule.pipeline == "merged_1f1b"
    beside, apart, layers = _layers(model, plan)
    # A layer that is the first of its stage has no segment from which it could leave.
    assert beside == 0 and layers - plan.schedule.interleave <= apart > 0
    report = run_plan(model, plan, check=True, backend=backend)
    assert report.ok, report.check


def test_stages_that_merge_passes_equal_one_device(folder: Path) -> None:
    options = {"stages": 2, "micro_batches": 4}
    _checked_in_stages(folder, "qwen2_moe", (2,), "e+t", options)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(("kind", "sizes", "option", "options"), STAGED)
def test_stages_of_all_shapes_merge_passes(
    folder: Path, kind: str, sizes: Sequence[int], option: str, options: Mapping[str, int]
) -> None:
    _checked_in_stages(folder, kind, sizes, option, options)


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("interleave", [1, 2])
def test_stages_merge_passes_on_the_strict_backend(folder: Path, interleave: int) -> None:
    options = {"stages": 2, "micro_batches": 4, "interleave": interleave}
    _checked_in_stages(folder, "qwen2_moe", (2,), "e+t", options, backend="strict")


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
