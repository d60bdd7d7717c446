"""Plans whose products are of 8 bits or fewer, on real ranks: equal to one device that rounds by
the same recipe, and the collectives are those that are priced.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.api import plan_loaded
from autopar.frontends.load import ModelOptions, load_model
from autopar.ir.recipes import recipe_of, with_precision
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from autopar.runtime.run import RunReport, run_plan
from tests.end_to_end.models import load
from tests.end_to_end.plans import request
from tests.planning.model.narrow_models import Stored, blocks, example

PIPELINE = {"scheme": "pipeline-1f1b", "stages": 2, "micro_batches": 4}
WAYS = {
    "data": {"scheme": "data"},
    "zero1": {"scheme": "zero3", "zero": 1, "micro_batches": 2},
    "zero2": {"scheme": "zero3", "zero": 2, "micro_batches": 2},
    "zero3": {"scheme": "zero3"},
    "zero3-recompute": {"scheme": "zero3", "zero": 3, "micro_batches": 2, "recompute": "full"},
    "megatron": {"scheme": "megatron"},
    "pipeline": PIPELINE,
    "micro-batches": {"scheme": "data", "micro_batches": 2},
    "recompute": {"scheme": "megatron", "recompute": "full"},
    "zero-bubble": {"stages": 2, "micro_batches": 4, "schedule": "zero_bubble"},
}


@functools.cache
def _model(name: str, dtype: str) -> LoadedModel:
    options = ModelOptions(dtype=dtype, precision=name)
    (inputs,) = example()
    return load_model(blocks(width=512), options, (inputs[:4],))


def _ran(name: str, way: str, ranks: int, dtype: str = "float64") -> tuple[Plan, RunReport]:
    model = _model(name, dtype)
    plan = plan_loaded(model, devices=ranks, cluster="dgx-b200", **WAYS[way]).plan
    return plan, run_plan(model, plan, steps=2, check=True)


@pytest.mark.parametrize(
    ("name", "way", "ranks"),
    [
        ("fp8", "data", 2),
        ("fp8", "megatron", 2),
        ("fp8-block", "megatron", 2),
        pytest.param("fp8", "pipeline", 4, marks=pytest.mark.slow),
        pytest.param("fp8-block", "zero3", 2, marks=pytest.mark.slow),
        pytest.param("mxfp8", "megatron", 2, marks=pytest.mark.slow),
        pytest.param("mxfp8", "pipeline", 4, marks=pytest.mark.slow),
        pytest.param("nvfp4", "zero3", 2, marks=pytest.mark.slow),
        pytest.param("nvfp4", "megatron", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_equal_one_device(name: str, way: str, ranks: int) -> None:
    """In double precision, where no noise lets an operand round to a neighbour, to its rounding."""
    _, report = _ran(name, way, ranks)
    assert report.ok and "as priced" in report.collectives, report
    assert "tolerance 1e-09" in report.check


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("fp8", "megatron"),
        ("mxfp8", "megatron"),
        pytest.param("fp8-block", "zero3", marks=pytest.mark.slow),
        pytest.param("nvfp4", "zero3", marks=pytest.mark.slow),
        pytest.param("fp8-block", "megatron", marks=pytest.mark.slow),
        pytest.param("fp8", "pipeline", marks=pytest.mark.slow),
    ],
)
def test_matrices_in_either_order(name: str, way: str) -> None:
    """Matrices of `addmm`, `mm` and `matmul` are rounded, split and gathered as they are stored."""
    (inputs,) = example()
    model = load_model(Stored(), ModelOptions(dtype="float64", precision=name), (inputs,))
    ranks = 4 if way == "pipeline" else 2
    plan = plan_loaded(model, devices=ranks, cluster="dgx-b200", **WAYS[way]).plan
    kinds = [op.kind for op in model.graph.operators if recipe_of(op) is not None]
    assert sorted(kinds) == ["aten.linear.default", "autopar.affine", "autopar.affine"]
    report = run_plan(model, plan, steps=2, check=True)
    assert report.ok and "as priced" in report.collectives, report


@pytest.mark.parametrize(
    ("name", "way"),
    [("fp8", "megatron"), pytest.param("fp8-block", "zero3", marks=pytest.mark.slow)],
)
def test_products_of_onnx(name: str, way: str, tmp_path: Path) -> None:
    model = load("gpt2_onnx", tmp_path, train=True, dtype="float64")
    model = replace(model, graph=with_precision(model.graph, name), precision=name)
    plan = plan_loaded(model, devices=2, cluster="dgx-b200", **WAYS[way]).plan
    assert {op.kind for op in model.graph.operators if recipe_of(op)} == {"autopar.affine"}
    report = run_plan(model, plan, steps=2, check=True)
    assert report.ok and "as priced" in report.collectives, report


@pytest.mark.parametrize("name", ["fp8", "fp8-block"])
@pytest.mark.parametrize(
    ("way", "ranks"),
    [
        ("micro-batches", 2),
        ("recompute", 2),
        ("zero-bubble", 2),
        ("megatron", 4),
        ("zero1", 2),
        ("zero2", 2),
        ("zero3-recompute", 2),
    ],
)
@pytest.mark.slow
def test_orders_of_a_step(name: str, way: str, ranks: int) -> None:
    """Scales are those of a micro-batch; a pass for weights alone needs no second maximum."""
    plan, report = _ran(name, way, ranks)
    assert report.ok and "as priced" in report.collectives, report
    assert plan.devices == ranks


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "nvfp4"])
@pytest.mark.slow
def test_gathers_take_narrow_bytes(name: str) -> None:
    """The four matrices are gathered so; norms, biases and the head's weight keep their type."""
    plan, report = _ran(name, "zero3-recompute", 2)
    assert report.ok and "as priced" in report.collectives, report
    graph = _model(name, "float64").graph
    narrow = [tensor for tensor in graph.parameters if tensor.narrow is not None]
    assert len(narrow) == 4
    nbytes = sum(tensor.bytes for tensor in narrow)
    assert nbytes == {"nvfp4": 0.5}.get(name, 1) * sum(tensor.size for tensor in narrow)
    names = {tensor.name for tensor in narrow}
    gathers = [c for c in plan.collectives if c.kind == "all_gather" and c.tensor in names]
    assert {c.nbytes for c in gathers} == {nbytes}


@pytest.mark.parametrize("name", ["fp8", "nvfp4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_narrower_types(name: str, dtype: str) -> None:
    """There some operands round to a neighbour, within the unit of their 8 or 4 bits."""
    _, report = _ran(name, "megatron", 2, dtype)
    assert report.ok, report.check
    assert f"tolerance {'6e-02' if name == 'nvfp4' else '3e-02'}" in report.check


def _mixtral(folder: Path, name: str) -> LoadedModel:
    model = load("mixtral", folder, train=True, dtype="float64")
    return replace(model, graph=with_precision(model.graph, name), precision=name)


def _with_experts(folder: Path, name: str, option: str) -> tuple[Plan, RunReport]:
    model = _mixtral(folder, name)
    layers = [op.name for op in model.graph.operators if op.kind == "autopar.experts"]
    wanted = request((2,), train=True)
    assert wanted.mesh is not None and layers
    axis = wanted.mesh.axes[0].name
    wanted = replace(wanted, limits=Pins(operators={layer: {axis: option} for layer in layers}))
    plan = search_plan(model.graph, wanted)
    return plan, run_plan(model, plan, steps=2, check=True)


@pytest.mark.parametrize(
    ("name", "option"),
    [("fp8", "e+t"), ("fp8-block", "e+t:once"), ("fp8-block", "e"), ("fp8", "t")],
)
def test_experts(name: str, option: str, tmp_path: Path) -> None:
    """A row is rounded alike wherever its expert lies."""
    _, report = _with_experts(tmp_path, name, option)
    assert report.ok and "as priced" in report.collectives, report


@pytest.mark.parametrize("name", ["fp8", "fp8-block", "nvfp4"])
@pytest.mark.slow
def test_experts_are_gathered_narrow(name: str, tmp_path: Path) -> None:
    """As they are stored; a matrix has its scales from all ranks that hold parts of it."""
    model = _mixtral(tmp_path, name)
    held = {t.name for t in model.graph.parameters if t.narrow is not None and len(t.shape) == 3}
    plan = plan_loaded(model, devices=2, cluster="dgx-b200", scheme="zero3", zero=3).plan
    assert held and all("S" in plan.parameters[name].storage for name in held)
    report = run_plan(model, plan, steps=2, check=True)
    assert report.ok and "as priced" in report.collectives, report
