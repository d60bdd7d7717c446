"""Types as a choice of a plan: what the memory lets in, the defaults, what is refused, and plan
files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import autopar
from autopar.api import plan_loaded
from autopar.cli import run as command
from autopar.errors import NoPlanFits, PlanError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.plan import Plan
from autopar.plan_origin import model_of_plan
from autopar.sharding.schedule import Types

WIDTH = 256
LAYERS = 4
X = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0))


def net() -> nn.Module:
    """A model of which nearly all bytes are weights."""
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU()]
    return nn.Sequential(*layers)


def planned(**wanted: Any) -> Plan:
    """A plan for one device."""
    return autopar.plan(
        net(), (X,), **({"devices": 1, "cluster": "dgx-h100", "dtype": "bfloat16"} | wanted)
    )


ELEMENTS = LAYERS * WIDTH * WIDTH


def mixed_onnx() -> onnx.ModelProto:
    """A product in bfloat16 whose result is normalised in float32."""
    weight = helper.make_tensor("weight", TensorProto.BFLOAT16, (8, 8), [0.5] * 64)
    nodes = [
        helper.make_node("MatMul", ["x", "weight"], ["product"], name="product"),
        helper.make_node("Cast", ["product"], ["wide"], name="widen", to=TensorProto.FLOAT),
        helper.make_node("Softmax", ["wide"], ["normal"], name="normalise"),
        helper.make_node("Cast", ["normal"], ["y"], name="narrow", to=TensorProto.BFLOAT16),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "mixed",
        [value("x", TensorProto.BFLOAT16, ("batch", 8))],
        [value("y", TensorProto.BFLOAT16, ("batch", 8))],
        [weight],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)])


@pytest.mark.parametrize(
    ("dtype", "inside"), [(None, "float32"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_a_model_of_mixed_types_is_loaded_again_as_it_was_planned(
    tmp_path: Path, dtype: str | None, inside: str
) -> None:
    """Also where all its parameters have one type: what is computed in another stays in that,
    unless a type was asked for.
    """
    path = tmp_path / "mixed.onnx"
    onnx.save(mixed_onnx(), str(path))
    plan = autopar.plan(path, devices=2, cluster="dgx-h100", batch=4, dtype=dtype)
    assert plan.model.dtype == dtype
    plan.save(tmp_path / "plan.json")
    loaded = model_of_plan(path, Plan.load(tmp_path / "plan.json"))
    assert loaded.graph.tensors["wide"].dtype == inside
    plan.require_match(loaded.graph)


def test_a_plan_is_printed_in_a_line() -> None:
    text = repr(planned())
    assert text == str(planned()) and len(text) < 200 and "dgx-h100" in text and "\n" not in text


def test_bytes_of_a_parameter() -> None:
    """Beside the peaks of an update: weights, gradients and moments of 8, or of 16 to 18 bytes a
    parameter.
    """
    low = planned(master="bfloat16")
    high = planned()
    many = planned(micro_batches=2)
    held = {
        name: plan.predicted.memory_parts
        for name, plan in (("low", low), ("high", high), ("many", many))
    }

    def bytes_of(name: str, *parts: str) -> float:
        return sum(held[name][part] for part in parts) / ELEMENTS

    assert bytes_of("low", "parameters", "master", "optimizer", "gradients") == pytest.approx(
        8, rel=0.02
    )
    assert bytes_of("high", "master", "optimizer", "gradients") == pytest.approx(16, rel=0.02)
    assert bytes_of("many", "parameters", "master", "optimizer", "gradients") == pytest.approx(
        18, rel=0.02
    )
    assert 1.5 < high.predicted.memory / low.predicted.memory < 2.5
    assert (
        high.predicted.update == pytest.approx(2 * low.predicted.update, rel=0.5)
        and high.predicted.step > low.predicted.step
    )


def test_a_memory_that_holds_16_bits_alone() -> None:
    limit = 0.75 * planned().predicted.memory
    with pytest.raises(NoPlanFits, match="master="):
        planned(memory=limit, offload="none")
    small = planned(memory=limit, offload="none", master="bfloat16")
    assert small.predicted.memory <= limit and small.schedule.types == Types()


@pytest.mark.parametrize(
    ("wanted", "types"),
    [
        ({}, ("float32", "float32")),
        ({"dtype": "float16"}, ("float32", "float32")),
        ({"dtype": None}, (None, None)),
        ({"dtype": "float32"}, (None, None)),
        ({"reduce": "bfloat16"}, ("float32", None)),
        ({"master": "bfloat16"}, (None, None)),
        ({"master": "bfloat16", "reduce": "float32"}, (None, "float32")),
        ({"master": "float64"}, ("float64", "float64")),
        ({"dtype": None, "reduce": "bfloat16"}, (None, "bfloat16")),
        ({"mode": "infer"}, (None, None)),
    ],
)
def test_defaults(wanted: dict[str, Any], types: tuple[str | None, str | None]) -> None:
    """Beside a 16-bit type that is asked for, float32; what changes nothing is not written down."""
    schedule = planned(**wanted).schedule
    assert (schedule.master, schedule.reduce) == types


def test_a_module_in_16_bits_stays_so_unless_asked() -> None:
    model = load_model(net().bfloat16(), ModelOptions(), (X.bfloat16(),))
    assert plan_loaded(model, devices=1, cluster="dgx-h100").plan.schedule.types == Types()
    wide = plan_loaded(model, devices=1, cluster="dgx-h100", master="float32").plan.schedule
    assert (wide.master, wide.reduce) == ("float32", "float32")


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"dtype": None, "master": "bfloat16"}, "used in float32"),
        ({"dtype": "bfloat16", "master": "float16"}, "not all of whose values"),
        ({"mode": "infer", "master": "float32"}, "training step"),
        ({"mode": "infer", "reduce": "float32"}, "training step"),
        ({"master": "float31"}, "float32"),
    ],
)
def test_refusals(wanted: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        planned(**wanted)


def test_files(tmp_path: Path) -> None:
    """Types are read back; a file without them has none; a wrong name is refused."""
    path = tmp_path / "plan.json"
    plan = planned()
    plan.save(path)
    assert Plan.load(path) == plan and plan.schedule.in_stage.types == Types(
        master="float32", reduce="float32"
    )
    data = json.loads(path.read_text())
    data["schedule"] = {
        name: value for name, value in data["schedule"].items() if name not in ("master", "reduce")
    }
    path.write_text(json.dumps(data))
    assert Plan.load(path).schedule.types == Types()
    data["schedule"]["master"] = "float8"
    path.write_text(json.dumps(data))
    with pytest.raises(PlanError, match=r"schedule\.master.*valid"):
        Plan.load(path)


def test_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "small.py").write_text(
        "import torch\nfrom torch import nn\n\ndef make():\n    return nn.Sequential(nn.Linear(8, "
        "8), nn.ReLU()), (torch.randn(4, 8),)\n"
    )
    monkeypatch.chdir(tmp_path)
    made = [
        "plan",
        "small:make",
        "--cluster",
        "local-cpu",
        "--devices",
        "1",
        "--dtype",
        "bfloat16",
        "-o",
        "plan.json",
        "--no-compare",
    ]
    assert command([*made, "--reduce", "bfloat16"]) == 0
    assert "precision trained parameters stored and updated in float32\n" in capsys.readouterr().out
    assert command(made) == 0
    assert (
        "stored and updated in float32, gradients added up in float32\n" in capsys.readouterr().out
    )
    assert command(["explain", "plan.json", "--model", "small:make"]) == 0
    assert command([*made, "--master", "bfloat16"]) == 0
    assert "precision" not in capsys.readouterr().out.split("precision trained")[-1]
