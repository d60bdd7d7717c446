"""Graphs of configurations on disk: planned again without any project, and never trusted."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar import configured, remembered_models
from autopar.api import plan_loaded
from autopar.configured import load_any
from autopar.errors import ModelError
from autopar.frontends.load import ModelOptions
from autopar.ir import Graph, text_of
from autopar.model import LoadedModel
from autopar.remembered import FOLDER
from autopar.runtime.run import run_plan
from tests.test_configured import written

pytest.importorskip("transformers")

OPTIONS = ModelOptions(batch=4, dims={"sequence": 16}, dtype="float32")


@pytest.fixture(name="model")
def model_of_configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A configuration of which nothing is remembered yet."""
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
    (file,) = (folder / "answers").iterdir()
    file.write_bytes(zlib.compress(text.encode()))


@pytest.mark.parametrize("text", ["", "[]", '["{}", []]', '["{}", [1]]', '[1, ["note"]]'])
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
    stored_instead(tmp_path, json.dumps((text_of(_renamed(first.source)), ())))
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
    monkeypatch.setattr(remembered_models, "source_of", lambda *rooms: [b"other code"])
    load_any(model, OPTIONS)
    assert len(loads) == 2
