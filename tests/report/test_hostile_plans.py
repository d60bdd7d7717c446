"""Plan files of strangers: names that hold escapes stay text, numbers are numbers, and no machine
is asked for a billion ranks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from onnx import TensorProto, helper

import autopar
from autopar.cli import main, run
from autopar.errors import PlanError, RunError
from autopar.printable import printable
from tests.plan_files import decide, rename

EVIL = "h.0\x1b[2J\x9b31m\x07\r‮\ud800/<b>&MatMul"
RAW = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]")


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    """A plan as its file holds it."""
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [8, 8]) for name in ("x", "y")]
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[8, 8])
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="h.0/MatMul")
    model = helper.make_model(
        helper.make_graph([node], "g", ends[:1], ends[1:], [weight]),
        opset_imports=[helper.make_opsetid("", 18)],
    )
    plan = autopar.plan(model, devices=2, cluster="local-cpu", scheme="data", stages=1)
    plain: dict[str, Any] = json.loads(plan.to_json())
    return plain


def written(folder: Path, data: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> Path:
    copy = json.loads(json.dumps(data))
    change(copy)
    path = folder / "plan.json"
    path.write_text(json.dumps(copy))
    return path


def _named(data: dict[str, Any]) -> None:
    rename(data, "h.0/MatMul", EVIL)
    data["model"]["name"] = data["cluster"] = data["mesh"][0]["name"] = data["mesh"][0]["level"] = (
        EVIL
    )
    data["replicated"] = [EVIL]
    data["provenance"]["method"] = data["model"]["optimizer"] = EVIL


@pytest.mark.parametrize("words", [(), (EVIL,), ("nothing\x1b[31m",), ("--json",)])
def test_names_stay_text(
    tmp_path: Path,
    data: dict[str, Any],
    words: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = written(tmp_path, data, _named)
    monkeypatch.setattr("sys.argv", ["autopar", "explain", str(path), *words])
    with pytest.raises(SystemExit):
        main()
    shown = "".join(capsys.readouterr())
    assert shown and not RAW.search(shown)


def test_printable_keeps_what_prints() -> None:
    assert printable("a × b\nc") == "a × b\nc" and not RAW.search(printable(EVIL))


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_are_numbers(tmp_path: Path, data: dict[str, Any], value: str) -> None:
    path = written(tmp_path, data, lambda held: held["predicted"].update(step="HERE"))
    path.write_text(path.read_text().replace('"HERE"', value))
    with pytest.raises(PlanError, match="number"):
        run(["explain", str(path)])


def test_no_billion_ranks(
    tmp_path: Path, data: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    path = written(tmp_path, data, lambda held: held["mesh"][0].update(size=2**31))
    assert run(["explain", str(path), "--json"]) == 0
    with pytest.raises(RunError, match="2147483648 ranks; at most"):
        run(["run", str(path), "--model", "m.onnx"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: decide(held, "h.0/MatMul", ["R", "R"]), "a strategy for 2 mesh axes, not 1"),
        (
            lambda held: held["parameters"]["w"].update(storage="S0 S1"),
            "'S0 S1', is for 2 mesh axes, not 1",
        ),
        (lambda held: held["parameters"]["w"].update(storage="Q"), "bad layout of 'w'"),
        (lambda held: held["redistributions"].update(w=[[]]), "empty redistribution of 'w'"),
    ],
)
def test_parts_that_do_not_fit(
    tmp_path: Path, data: dict[str, Any], change: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = written(tmp_path, data, change)
    for words in (
        ["explain", str(path)],
        ["report", str(path), "-o", str(tmp_path / "r.html")],
        ["convert", str(path), "--to", "fsdp2"],
    ):
        with pytest.raises(PlanError, match=message):
            run(words)
