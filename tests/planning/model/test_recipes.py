"""Recipes of precision as a choice of a plan: names, devices, which products follow one, prices,
files and words.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.costmodel import load_cluster
from autopar.costmodel.device.narrow_kernels import recipes_of
from autopar.errors import AutoparError, ClusterError, PlanError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.ir.recipes import NAMES, RECIPES, recipe_of
from autopar.options.values import PRECISIONS
from autopar.plan import Plan
from autopar.plan_origin import model_of_plan
from autopar.report.tables import summary_lines
from autopar.sharding.analysis import analyse
from tests.planning.model.narrow_models import Routed, blocks, example


def planned(precision: str | None, **wanted: Any) -> Plan:
    """A plan of two blocks for four devices."""
    given = {"devices": 4, "cluster": "dgx-b200", "scheme": "megatron"} | wanted
    return autopar.plan(blocks(), example(), precision=precision, **given)


def narrow_products(module: nn.Module, inputs: Any, name: str = "fp8") -> dict[str, bool]:
    """The operators that follow a recipe, and whether each keeps its values narrow."""
    graph = load_model(module, ModelOptions(precision=name), inputs).graph
    return {
        op.name.partition("/")[0]: op.attributes.get("keeps_narrow") is True
        for op in graph.operators
        if recipe_of(op) is not None
    }


def test_names() -> None:
    assert PRECISIONS == NAMES
    with pytest.raises(UsageError, match=r"fp9.*bf16.*fp8.*fp8-block.*mxfp8.*nvfp4"):
        planned("fp9")


@pytest.mark.parametrize(
    ("cluster", "has"),
    [
        ("dgx-a100-80g", ("bf16",)),
        ("dgx-h100", ("bf16", "fp8", "fp8-block")),
        ("dgx-b200", ("bf16", "fp8", "fp8-block", "mxfp8", "nvfp4")),
        ("mi300x", ("bf16", "fp8")),
        ("l4", ("bf16", "fp8")),
        ("local-cpu", ("bf16",)),
    ],
)
def test_devices(cluster: str, has: tuple[str, ...]) -> None:
    assert recipes_of(load_cluster(cluster).device) == has


def test_a_device_without_such_products_refuses() -> None:
    with pytest.raises(ClusterError, match=r"A100.* no products for .*fp8.; .* for bf16$"):
        planned("fp8", cluster="dgx-a100-80g")
    with pytest.raises(ClusterError, match=r"H100.*mxfp8.; it has those for bf16, fp8, fp8-block"):
        planned("mxfp8", cluster="dgx-h100")


def test_products_that_follow_a_recipe() -> None:
    """The last product and the one that scores experts do not, nor what has no aligned sides.

    Only values that nothing else keeps are kept in 8 bits.
    """
    assert narrow_products(blocks(), example()) == {
        "0.up": True,
        "0.down": True,
        "1.up": True,
        "1.down": True,
    }
    assert narrow_products(Routed(), (torch.randn(4, 64, 64),)) == {
        "left": False,
        "right": False,
        "out": True,
    }
    with pytest.raises(UsageError, match="has no product that it applies to"):
        narrow_products(nn.Sequential(nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 4)), example(20))


def test_all_else_is_in_bfloat16() -> None:
    plan = planned("fp8")
    assert (plan.model.precision, plan.model.dtype) == ("fp8", "bfloat16")
    assert plan.schedule.master == "float32"
    assert planned("fp8", dtype="float32").model.dtype == "float32"
    assert planned("bf16").model.dtype == "bfloat16"
    with pytest.raises(UsageError, match=r"bf16. is dtype=.bfloat16"):
        planned("bf16", dtype="float16")


def test_flops_by_type() -> None:
    plain = planned("bf16").model.flops["bfloat16"]
    flops = planned("nvfp4").model.flops
    assert sum(flops.values()) == plain
    assert flops["float4"] / plain == pytest.approx(8 / 9)


def test_a_largest_element_is_reduced_where_a_tensor_is_split() -> None:
    """Megatron splits weights and one value, or one gradient, of each pair.

    Those of all weights are one message a step; no shard cuts a block.
    """
    seen = {
        name: [c for c in planned(name).collectives if c.nbytes in (4, 16)]
        for name in ("fp8", "fp8-block", "nvfp4")
    }
    assert not seen["fp8-block"]
    for name in ("fp8", "nvfp4"):
        weights, *others = sorted(seen[name], key=lambda c: -c.nbytes)
        assert (weights.nbytes, weights.phase) == (16, "forward")
        # up: the gradient of its result; down: its values.
        phases = [c.phase for c in others]
        assert (phases.count("forward"), phases.count("backward")) == (2, 2)
        assert {c.kind for c in seen[name]} == {"all_reduce"}


@pytest.mark.parametrize(("width", "blocks_of_it"), [(512, 4), (384, 3), (528, 528)])
def test_a_split_cuts_no_block(width: int, blocks_of_it: int) -> None:
    """Blocks of 128: of 512 two devices have two each, 384 is not halved, 528 stays whole."""
    module = blocks(width=width)
    graph = load_model(module, ModelOptions(precision="fp8-block"), example()).graph
    rule = analyse(graph, train=True).offers["0.up/linear"].rule
    (outer,) = (factor for factor in rule.factors if factor.name == "n")
    assert (outer.size, outer.whole) == (blocks_of_it, blocks_of_it == width)


def test_rounded_operands_are_neither_partial_nor_shares() -> None:
    graph = load_model(blocks(), ModelOptions(precision="fp8"), example()).graph
    names = {o.name for o in analyse(graph, train=True).offers["0.up/linear"].options}
    assert names == {"R", "d0", "d1", "k", "n"}


def test_narrow_products_take_less_time_and_memory() -> None:
    """Large products do; small ones wait for casts and launches."""
    big = {"devices": 1, "scheme": None, "cluster": "dgx-b200", "mesh": None}
    module = blocks(hidden=4096, width=16384)
    inputs = (torch.empty(4, 2048, 4096, device="meta"),)
    plans = {
        name: autopar.plan(module.to("meta"), inputs, precision=name, **big)
        for name in ("bf16", "fp8", "nvfp4")
    }
    steps = [plan.predicted.step for plan in plans.values()]
    assert steps[0] > 1.3 * steps[1] > 1.3 * steps[2]
    saved = [plan.predicted.memory_parts["activations"] for plan in plans.values()]
    assert saved[0] > saved[1] > saved[2]


def test_files_and_words(tmp_path: Path) -> None:
    plan = planned("fp8-block")
    plan.save(tmp_path / "plan.json")
    read = Plan.load(tmp_path / "plan.json")
    assert read == plan
    loaded = model_of_plan(blocks(), read, example())
    assert loaded.precision == "fp8-block"
    lines = summary_lines(plan, "")
    assert any("precision fp8-block in 89% of the FLOPs of products" in line for line in lines)
    told = str(autopar.explain(plan, "1.down/linear", model=blocks(), example_inputs=example()))
    assert "reads operands by the recipe fp8-block, its values are kept so" in told
    data = json.loads((tmp_path / "plan.json").read_text())
    data["model"]["precision"] = "fp9"
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"model\.precision.*fp8-block"):
        Plan.load(tmp_path / "plan.json")
    # Without its recipe it is another model.
    del data["model"]["precision"]
    (tmp_path / "plan.json").write_text(json.dumps(data))
    with pytest.raises(AutoparError):
        model_of_plan(blocks(), Plan.load(tmp_path / "plan.json"), example())


def test_bytes_of_elements() -> None:
    """With their shares of scales: 4 of 128, 1 of 32, 1 of 16 elements."""
    sizes = {name: recipe.bytes for name, recipe in RECIPES.items()}
    assert RECIPES["fp8"].traffic == 2.5 and RECIPES["mxfp8"].traffic < 1.6
    assert sizes == {"fp8": 1, "fp8-block": 1 + 4 / 128, "mxfp8": 1 + 1 / 32, "nvfp4": 0.5 + 1 / 16}
