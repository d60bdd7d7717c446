"""Plans that are searched within what a target can say: they convert, and lie in its space."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest
from convert_models import build, styles_of
from report_models import perceptrons, planned

import autopar
from autopar.api import plan_loaded
from autopar.cli import run
from autopar.configured import load_any
from autopar.costmodel import load_cluster
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.integrations.convert import REACHES, convert
from autopar.integrations.convert.splittable import BY_DEGREES, BY_MODULE, BY_STYLE, Owners
from autopar.integrations.convert.stage_layers import stage_layers
from autopar.model import LoadedModel
from autopar.options.targets import SCHEMES
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.planning.model.restrictions import Space
from autopar.planning.space.candidates import meshes_for, splits_named
from autopar.schemes.axis import lacking
from autopar.schemes.splits import profiles_of
from autopar.sharding.analysis import analyse
from autopar.sharding.layer_numbers import between_layers
from autopar.sharding.mesh import Axis, Mesh
from benchmarks.convertible.models import build as public_model
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.end_to_end.small_types import small_configuration

GIVEN: dict[str, Any] = {"devices": 8, "cluster": "dgx-h100"}
SHAPE = {"layers": 8, "hidden": 2048, "heads": 16, "ffn": 8192, "vocab": 32000, "sequence": 2048}


def dense(kv_heads: int = 16, batch: int = 64) -> LoadedModel:
    """A model large enough for several devices to be worth it."""
    graph = transformer(Shape(kv_heads=kv_heads, **SHAPE), batch=batch).graph
    return LoadedModel(graph=graph, source=graph)


@pytest.mark.parametrize("target", REACHES)
def test_a_plan_for_a_target_converts(target: str) -> None:
    plan = autopar.plan(*build(), devices=2, cluster="dgx-h100", target=target)
    assert convert(plan, target).text
    assert target != "pipelining" or len(plan.stages) == 2
    names = {name for reach in REACHES[target] for name in reach.axes}
    assert {axis.name for axis in plan.mesh} <= names


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("target", REACHES)
def test_of_a_large_model_too(target: str) -> None:
    plan = plan_loaded(dense(), target=target, **GIVEN).plan
    assert convert(plan, target).text and plan.provenance.gap is not None


@pytest.mark.slow
@pytest.mark.ci
def test_a_restriction_is_no_faster_than_what_it_restricts() -> None:
    model = dense()
    free = plan_loaded(model, **GIVEN).plan
    within = plan_loaded(model, target="megatron", **GIVEN).plan
    bound = free.provenance.lower_bound
    assert within.predicted.step >= bound * (1 - 1e-9)
    assert within.predicted.step < 1.2 * free.predicted.step


def test_stages_hold_whole_layers() -> None:
    plan = planned(layers=5, target="megatron", mesh=(2,), stages=2, micro_batches=4).plan
    layout = stage_layers(plan)
    assert layout is not None and not layout.cut
    assert [layer for chunk in layout.chunks for layer in chunk] == list(range(5))


def test_experts_are_said(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(small_configuration("mixtral")))
    loaded = load_any(f"hf:{tmp_path}", ModelOptions(batch=4, dims={"sequence": 16}))
    plan = plan_loaded(loaded, devices=2, cluster="local-cpu", target="megatron", mesh=(2,)).plan
    degree = re.search(r"--expert-model-parallel-size (\d+)", convert(plan, "megatron").text)
    names = [axis.name for axis in plan.mesh]
    assert degree is not None and int(degree[1]) == (2 if names == ["expert"] else 1)


def test_no_more_devices_than_divide_key_value_heads() -> None:
    grouped = dense(kv_heads=2)
    analysis = analyse(grouped.graph, train=True)
    for size, fits in ((2, True), (4, False)):
        mesh = Mesh(axes=(Axis(name="tensor", size=size),))
        reason = lacking([SCHEMES["tensor"]], analysis, profiles_of(analysis), mesh)
        assert (reason is None) == fits


def test_meshes_are_named_after_their_work() -> None:
    space = Space(
        axes=(("data",), ("shard",), ("tensor", "tensor-sp")),
        zeros=(0,),
        recomputes=("none",),
        schedules=("1f1b",),
    )
    cluster = load_cluster("dgx-h100").sized(8)
    request = Request(cluster=cluster, space=space)
    named = [tuple((a.name, a.size) for a in mesh.axes) for mesh in meshes_for(request, cluster)]
    assert len(set(named)) == len(named)
    # An outer axis of more devices is no mirror image of an inner one.
    assert (("data", 4), ("tensor", 2)) in named and (("data", 2), ("tensor", 4)) in named
    assert not [names for names in named if {"tensor", "tensor-sp"} <= {name for name, _ in names}]
    needing = replace(request, space=replace(space, needed=frozenset({"tensor"})))
    for mesh in meshes_for(needing, cluster):
        assert "tensor" in {axis.name for axis in mesh.axes}


def test_an_axis_is_split_into_its_name_and_another() -> None:
    def mesh(**sizes: int) -> Mesh:
        return Mesh.of(**sizes)

    coarse = mesh(shard=8, tensor=2)
    assert splits_named(coarse, mesh(data=2, shard=4, tensor=2))
    assert splits_named(coarse, mesh(shard=4, context=2, tensor=2))
    assert not splits_named(coarse, mesh(data=2, context=4, tensor=2))
    assert not splits_named(coarse, mesh(shard=2, tensor=4, other=2))


@pytest.mark.parametrize(
    ("names", "places"),
    [
        (["h.0/linear", "h.1/linear"], (range(1, 2),)),
        (["e/linear", "h.0/a/linear", "h.0/add", "h.1/linear"], (range(2, 4),)),
        (["e.0/linear", "e.1/linear", "d.0/linear"], (range(1, 2), range(2, 3))),
        (["h.0/linear", "h.0/linear", "h.2/linear"], ()),
        (["a/linear", "b/linear"], ()),
    ],
)
def test_places_between_layers(names: list[str], places: tuple[range, ...]) -> None:
    assert between_layers((name, "linear" in name) for name in names) == places


def test_what_a_search_does_not_choose_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="no plan of this model with these options"):
        planned(target="torchtitan", optimizer="sgd")
    with pytest.raises(UsageError, match="unknown target 'alpa'"):
        planned(target="alpa")


def test_samples_that_are_compared_have_no_shares() -> None:
    module, inputs = public_model("clip")
    given: dict[str, Any] = {"devices": 2, "cluster": "dgx-h100"}
    for target in ("pipelining", "fsdp2"):
        with pytest.raises(
            UsageError, match=r"shares of the batch, and .* depends on the whole batch"
        ):
            autopar.plan(module, inputs, target=target, **given)
    styles = autopar.plan(module, inputs, target="transformers", **given)
    assert {axis.name for axis in styles.mesh} == {"tensor"}


def test_the_command_converts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = tmp_path / "plan.json"
    onnx.save(perceptrons(), tmp_path / "net.onnx")
    options = ["--target", "megatron", "--devices", "4", "--cluster", "local-cpu", "--quiet"]
    run(["plan", str(tmp_path / "net.onnx"), *options, "-o", str(saved)])
    run(["convert", str(saved), "--to", "megatron"])
    assert "--tensor-model-parallel-size" in capsys.readouterr().out
    assert Plan.load(saved).mesh


def test_products_of_their_own_modules_are_split() -> None:
    owners = Owners.of(["a.up/linear", "a.gate/linear", "a.gate/topk", "a/add", "b"])
    linear = "aten.linear.default"
    assert BY_MODULE.takes("a.up/linear", linear, ["a.up.weight"], owners)
    assert not BY_MODULE.takes("a.gate/linear", linear, ["a.gate.weight"], owners)
    assert not BY_MODULE.takes("a.up/linear", "aten.addmm.default", ["a.up.weight"], owners)
    assert not BY_MODULE.takes("a.up/linear", linear, ["a.table"], owners)
    assert BY_DEGREES.takes("a.gate/linear", linear, ["a.gate.weight"], owners)
    assert not BY_DEGREES.takes("a/conv2d", "aten.conv2d.default", ["a.weight"], owners)
    for bias, taken in (("a.up.bias", True), ("a.bias", False)):
        held = ["a.up.weight", bias]
        assert BY_MODULE.takes("a.up/linear", linear, held, owners)
        assert BY_STYLE.takes("a.up/linear", linear, held, owners) == taken
    assert BY_MODULE.looks_up("aten.embedding.default")
    assert not BY_MODULE.looks_up("aten.index.Tensor")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("mixtral", "gate"),
        ("t5", "EncDecAttention"),
        ("swin", "relative_position"),
        ("vit", "conv"),
    ],
)
def test_what_styles_do_not_split_stays_whole(name: str, whole: str) -> None:
    pytest.importorskip("transformers")
    plan = autopar.plan(*public_model(name), devices=2, cluster="dgx-h100", target="transformers")
    styles = styles_of(convert(plan, "transformers").text)
    assert styles and not [module for module in styles if whole in module]
