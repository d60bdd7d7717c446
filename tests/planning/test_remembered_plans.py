"""Plans on disk: the same search is made once, and nothing but the same search is recalled."""

from __future__ import annotations

import json
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from autopar.api import plan_loaded
from autopar.cli import run
from autopar.costmodel import load_cluster
from autopar.errors import NoPlanFits
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.operators import register_rule
from autopar.planning import remembered_plans
from autopar.planning.model.effort import EFFORT
from autopar.planning.model.pins import Pins
from autopar.planning.model.request import Request
from autopar.planning.remembered_plans import Searches
from autopar.remembered import FOLDER
from autopar.schemes import scheme_named
from autopar.schemes.pinning import pinned
from autopar.sharding.analysis import analyse
from autopar.sharding.rules import RULES
from tests.report_models import perceptrons

REQUEST = Request(cluster=load_cluster("dgx-h100").sized(4))


@pytest.fixture(name="folder")
def folder_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "answers"
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def loaded(layers: int = 2, hidden: int = 16) -> LoadedModel:
    return load_model(perceptrons(layers, hidden), ModelOptions())


def searched(request: Request = REQUEST, model: LoadedModel | None = None) -> tuple[int, int]:
    """The numbers of plans recalled and made by one search."""
    searches = Searches((model or loaded()).graph, request)
    searches.plan(request)
    return searches.recalled, searches.made


def test_a_search_is_made_once(folder: Path) -> None:
    first, second = (plan_loaded(loaded(), devices=4, cluster="dgx-h100") for _ in range(2))
    assert second.plan == first.plan
    assert second.plan.to_json() == first.plan.to_json()
    assert any("remembered" in note for note in second.notes)
    assert not any("remembered" in note for note in first.notes)
    assert len(list(folder.glob("plan-*"))) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"memory": 2.0**30},
        {"cluster": load_cluster("dgx-a100").sized(4)},
        {"optimizer": "sgd"},
        {"stages": 1},
        {"limits": Pins(operators={"*": {}})},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_request_is_another_search(folder: Path, change: dict[str, Any]) -> None:
    assert searched() == (0, 1)
    assert searched(replace(REQUEST, **change)) == (0, 1)
    assert searched(replace(REQUEST, **change)) == (1, 0)


def test_another_model_is_another_search(folder: Path) -> None:
    assert searched() == (0, 1)
    model = loaded()
    other = replace(model.graph, constants={"c": np.ones(3)})
    for graph in (loaded(hidden=32).graph, loaded(layers=3).graph, other):
        assert searched(model=replace(model, graph=graph)) == (0, 1)


@pytest.mark.parametrize("scheme", ["zero1", "megatron"])
def test_a_scheme_is_a_search_of_its_own(folder: Path, scheme: str) -> None:
    analysis = analyse(loaded().graph, train=True)
    assert searched() == (0, 1)
    request = pinned(REQUEST, scheme_named(scheme), analysis)
    assert searched(request) == (0, 1)
    assert searched(request) == (1, 0)


def test_other_code_or_effort_is_another_search(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    searched()
    with monkeypatch.context() as changed:
        changed.setattr(remembered_plans, "source_of", lambda *rooms: "other code")
        assert searched() == (0, 1)
    with monkeypatch.context() as changed:
        changed.setattr(remembered_plans, "EFFORT", replace(EFFORT, split=1))
        assert searched() == (0, 1)
    assert searched() == (1, 0)


def test_a_users_restriction_is_searched_anew(folder: Path) -> None:
    plain = Pins()
    request = replace(REQUEST, limits=lambda analysis, mesh: plain(analysis, mesh))
    assert [searched(request) for _ in range(2)] == [(0, 1), (0, 1)]
    assert not folder.exists()


def test_rules_of_users_are_part_of_the_search(folder: Path) -> None:
    graph = loaded().graph
    relu = "aten.relu.default"
    own = [replace(op, kind="own.gelu") if op.kind == relu else op for op in graph.operators]
    assert any(op.kind == "own.gelu" for op in own)
    model = replace(loaded(), graph=replace(graph, operators=tuple(own)))
    for rule, recalled in (("a b -> a b", 0), ("a !b -> a !b", 0), ("a b -> a b", 1)):
        register_rule("own.gelu", rule)
        assert searched(model=model) == (recalled, 1 - recalled)
        del RULES["own.gelu"]
    register_rule("own.gelu", lambda call: "a b -> a b")
    assert [searched(model=model) for _ in range(2)] == [(0, 1), (0, 1)]
    del RULES["own.gelu"]


def test_that_nothing_fits_is_remembered(folder: Path) -> None:
    request = replace(REQUEST, memory=1.0)
    errors = []
    for _ in range(2):
        searches = Searches(loaded().graph, request)
        with pytest.raises(NoPlanFits) as failure:
            searches.plan(request)
        errors.append((str(failure.value), failure.value.minimum, failure.value.memory_limit))
    assert searches.made == 0
    assert errors[0] == errors[1]


def test_an_interrupted_search_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = remembered_plans.search_plan

    def interrupted(*args: Any, **more: Any) -> Any:
        plan = search(*args, **more)
        origin = plan.provenance.model_copy(update={"complete": False})
        return plan.model_copy(update={"provenance": origin})

    monkeypatch.setattr(remembered_plans, "search_plan", interrupted)
    assert [searched() for _ in range(2)] == [(0, 1), (0, 1)]


def _other_model(text: str) -> str:
    data = json.loads(text)
    data["model"]["fingerprint"] = "0" * 32
    return json.dumps(data)


def _layouts(text: str) -> str:
    data = json.loads(text)
    next(iter(data["parameters"].values()))["storage"] = "S0 S0 S0"
    return json.dumps(data)


@pytest.mark.parametrize(
    "torn",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: '{"message": "no", "minimum": "x", "memory_limit": 1}',
        lambda text: '{"message"',
        lambda text: text.replace('"unused": 0', '"unused": 4'),
        lambda text: text.replace('"cluster": "dgx-h100"', '"cluster": "dgx-a100"', 1),
        _other_model,
        _layouts,
    ],
)
def test_what_is_no_plan_of_the_search_is_made_anew(folder: Path, torn: Any) -> None:
    searched()
    (file,) = folder.glob("plan-*")
    whole = file.read_bytes()
    text = zlib.decompress(whole).decode()
    assert torn(text) != text
    file.write_bytes(zlib.compress(torn(text).encode()))
    assert searched() == (0, 1)
    assert zlib.decompress(file.read_bytes()).decode() == text


def test_commands_share_their_searches(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.onnx"
    onnx.save_model(perceptrons(2, 16), path)
    words = ["plan", str(path), "--devices", "4", "--cluster", "dgx-h100", "--no-compare"]
    for name in ("one", "two"):
        run([*words, "-o", str(tmp_path / f"{name}.json")])
    said = capsys.readouterr().out
    assert said.count("remembered") == 1
    run([*words, "--no-cache", "-o", str(tmp_path / "three.json")])
    assert "remembered" not in capsys.readouterr().out
    texts = {(tmp_path / f"{name}.json").read_text() for name in ("one", "two", "three")}
    assert len(texts) == 1
    run(["cache", "show", "--json"])
    assert json.loads(capsys.readouterr().out)["counts"] == {"graph": 1, "plan": 1}
    run(["cache", "show"])
    assert "1 graph, 1 plan" in capsys.readouterr().out
    run(["cache", "clear"])
    assert "removed: 2" in capsys.readouterr().out
    assert not list(folder.iterdir())
