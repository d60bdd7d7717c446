"""Graphs of configurations on disk: planned again without any project, and never trusted."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from autopar import configured, remembered_models
from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.errors import ModelError
from autopar.frontends.load import ModelOptions
from autopar.ir import Graph, text_of
from autopar.model import LoadedModel
from autopar.plan_origin import model_of_batch, model_of_plan
from autopar.remembered import FOLDER
from tests.test_configured import written

ONNX = ModelOptions(batch=4)

OPTIONS = ModelOptions(batch=4, dims={"sequence": 16}, dtype="float32")


@pytest.fixture(name="model")
def model_of_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration of which nothing is remembered yet."""
    pytest.importorskip("transformers")
    monkeypatch.setenv(FOLDER, str(tmp_path / "answers"))
    return written(tmp_path)


@pytest.fixture(name="loads")
def loads_of_modules(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The configurations of which modules are made, from here on."""
    made: list[str] = []
    make = configured.configured

    def counted(path: str, dtype: str) -> Any:
        made.append(path)
        return make(path, dtype)

    monkeypatch.setattr(configured, "configured", counted)
    return made


def same(one: LoadedModel, other: LoadedModel) -> bool:
    graphs = one.graph.fingerprint() == other.graph.fingerprint()
    return graphs and one.source == other.source and one.notes == other.notes


def test_a_model_is_planned_again_without_its_project(model: str, loads: list[str]) -> None:
    first, second = (load_any(model, OPTIONS) for _ in range(2))
    plans = [plan_loaded(each, devices=2, cluster="local-cpu").plan for each in (first, second)]
    assert len(loads) == 1
    assert same(first, second)
    assert plans[0].model == plans[1].model


@pytest.mark.gloo
def test_a_remembered_model_runs(model: str, loads: list[str]) -> None:
    load_any(model, OPTIONS)
    loaded = load_any(model, OPTIONS)
    plan = plan_loaded(
        loaded, devices=2, cluster="local-cpu", mesh=(2,), scheme="zero3", optimizer="sgd"
    ).plan
    assert len(loads) == 1
    from autopar.runtime.run import run_plan

    report = run_plan(loaded, plan, check=True)
    assert report.ok, report.check
    assert len(loads) == 2


@pytest.mark.parametrize(
    "change",
    [
        {"batch": 8},
        {"dims": {"sequence": 8}},
        {"dtype": "bfloat16"},
        {"train": False},
        {"frozen": ("*.mlp.*",)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_other_options_are_another_model(
    model: str, loads: list[str], change: dict[str, Any]
) -> None:
    first = load_any(model, OPTIONS)
    other = load_any(model, replace(OPTIONS, **change))
    assert len(loads) == 2
    assert first.graph.fingerprint() != other.graph.fingerprint()


def test_another_configuration_is_another_model(
    model: str, tmp_path: Path, loads: list[str]
) -> None:
    load_any(model, OPTIONS)
    load_any(written(tmp_path, num_hidden_layers=1), OPTIONS)
    assert len(loads) == 2


def test_a_loss_of_the_users_own_is_not_remembered(model: str, loads: list[str]) -> None:
    options = replace(OPTIONS, loss=lambda outputs, **given: outputs.logits.square().mean())
    load_any(model, options)
    load_any(model, options)
    assert len(loads) == 2


def stored_instead(folder: Path, text: str) -> None:
    for file in (folder / "answers").iterdir():
        file.write_bytes(zlib.compress(text.encode()))


@pytest.mark.parametrize(
    "text", ["", "[]", '["{}", [], {}]', '["{}", [1], {}]', '[1, ["note"], {}]', '["{}", [], 1]']
)
def test_what_is_no_answer_is_made_anew(
    model: str, tmp_path: Path, loads: list[str], text: str
) -> None:
    first = load_any(model, OPTIONS)
    stored_instead(tmp_path, text)
    assert same(load_any(model, OPTIONS), first)
    assert len(loads) == 2
    load_any(model, OPTIONS)
    assert len(loads) == 2


def test_another_graph_is_not_run(model: str, tmp_path: Path) -> None:
    """Whoever writes into the folder of answers changes a plan, but no run."""
    first = load_any(model, OPTIONS)
    stored_instead(tmp_path, json.dumps((text_of(_renamed(first.source)), (), {})))
    other = load_any(model, OPTIONS)
    assert other.graph.fingerprint() != first.graph.fingerprint()
    with pytest.raises(ModelError, match="not the one that is remembered"):
        _ = other.module
    with pytest.raises(ModelError, match="not the one that is remembered"):
        _ = other.inputs


def _renamed(graph: Graph) -> Graph:
    last = replace(graph.operators[-1], name="another")
    return replace(graph, operators=(*graph.operators[:-1], last))


def test_code_that_graphs_rest_on_is_in_the_key(
    model: str, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    load_any(model, OPTIONS)
    monkeypatch.setattr(remembered_models, "source_of", lambda *rooms: "other code")
    load_any(model, OPTIONS)
    assert len(loads) == 2


def test_the_model_of_a_plan_is_the_one_that_was_planned(model: str, loads: list[str]) -> None:
    loaded = load_any(model, OPTIONS)
    plan = plan_loaded(loaded, devices=2, cluster="local-cpu").plan
    assert same(model_of_plan(model, plan), loaded)
    assert len(loads) == 1
    model_of_batch(model, plan, 8)
    assert len(loads) == 2


# --- ONNX files. ---


@pytest.fixture(name="file")
def onnx_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file with a constant that its graph depends on, in a file beside it."""
    monkeypatch.setenv(FOLDER, str(tmp_path / "answers"))
    return saved(tmp_path / "model.onnx")


def saved(path: Path, sizes: tuple[int, ...] = (4, 2, 8)) -> Path:
    """`reshape(x w) * 2`, whose shape lies in a file of data."""
    stored = {"w": np.ones((16, 16), np.float32), "sizes": np.array(sizes, np.int64)}
    two = numpy_helper.from_array(np.array(2.0, np.float32))
    nodes = [
        helper.make_node("Constant", [], ["two"], value=two),
        helper.make_node("MatMul", ["x", "w"], ["xw"]),
        helper.make_node("Reshape", ["xw", "sizes"], ["r"]),
        helper.make_node("Mul", ["r", "two"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        "scaled",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, (4, 16))],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in stored.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    path.with_suffix(".data").unlink(missing_ok=True)
    onnx.save_model(
        model, path, save_as_external_data=True, location="model.data", size_threshold=0
    )
    return path


@pytest.fixture(name="imports")
def imports_of_files(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The ONNX files that are imported, from here on."""
    made: list[Any] = []
    load = configured.load_model

    def counted(model: Any, *rest: Any) -> LoadedModel:
        made.append(model)
        return load(model, *rest)

    monkeypatch.setattr(configured, "load_model", counted)
    return made


def test_a_file_is_imported_once(file: Path, imports: list[Any]) -> None:
    first, second = (load_any(file, ONNX) for _ in range(2))
    assert len(imports) == 1
    assert first.source.constants and repr(first.source) == repr(second.source)
    assert first.graph.fingerprint() == second.graph.fingerprint()
    assert second.weights is not None and "w" in {name for name, _ in second.weights()}
    assert len(imports) == 2


def test_known_values_and_the_outputs_asked_for_are_remembered(file: Path) -> None:
    asked = replace(ONNX, values={"x": 1.0}, outputs=("y",))
    first, second = (load_any(file, asked) for _ in range(2))
    assert first.values == second.values == {"x": 1.0}
    assert first.outputs == second.outputs == ("y",)


def test_other_data_beside_a_file_is_another_model(file: Path, imports: list[Any]) -> None:
    load_any(file, ONNX)
    before = file.read_bytes()
    saved(file, sizes=(4, 4, 4))
    assert file.read_bytes() == before
    loaded = load_any(file, ONNX)
    assert len(imports) == 2
    assert loaded.graph.tensors["y"].shape == (4, 4, 4)


def test_another_file_of_the_same_name_is_another_model(file: Path, imports: list[Any]) -> None:
    load_any(file, ONNX)
    model = onnx.load(file, load_external_data=False)
    model.graph.node[-1].op_type = "Sub"
    file.write_bytes(model.SerializeToString())
    assert [op.kind for op in load_any(file, ONNX).source.operators][-1] == "aten.sub.Tensor"
    assert len(imports) == 2


def test_another_constant_is_not_run(file: Path, tmp_path: Path) -> None:
    source = load_any(file, ONNX).source
    (answer,) = (tmp_path / "answers").iterdir()
    _, notes, besides = json.loads(zlib.decompress(answer.read_bytes()))
    other = replace(source, constants={name: 5 * a for name, a in source.constants.items()})
    stored_instead(tmp_path, json.dumps((text_of(other), notes, besides)))
    loaded = load_any(file, ONNX)
    assert loaded.weights is not None
    with pytest.raises(ModelError, match="not the one that is remembered"):
        loaded.weights()
