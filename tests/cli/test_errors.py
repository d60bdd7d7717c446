"""Errors of the command line: a JSON object where --json asks for one, hints in a line."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

import onnx
import pytest
from report_models import perceptrons

from autopar.cli import main, output
from autopar.errors import NoPlanFits


def _status(words: list[str], monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.setattr(sys, "argv", ["autopar", *words])
    monkeypatch.setattr(output, "_PRINTED", output._Printed())
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code


def test_an_error_is_an_object_where_an_object_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tmp_path / "model.onnx")
    onnx.save(perceptrons(), model)
    small = ["plan", model, "--devices", "2", "--cluster", "dgx-h100", "--memory", "1KiB"]
    assert _status([*small, "--json"], monkeypatch) == 4
    printed = capsys.readouterr()
    told = json.loads(printed.out)["error"]
    assert told["kind"] == "NoPlanFits" and told["exit_code"] == 4
    assert told["minimum_memory"] > told["memory_limit"] == 1024
    assert printed.err.startswith("autopar: error: ")
    assert _status(small, monkeypatch) == 4
    assert capsys.readouterr().out == ""


def test_an_answer_is_the_only_object(capsys: pytest.CaptureFixture[str]) -> None:
    output._PRINTED.done = False
    output.print_json({"ok": False})
    output.print_json_error(output.NoPlanFits("none", minimum=2.0, memory_limit=1.0))
    assert json.loads(capsys.readouterr().out) == {"ok": False}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--devcies", "4"], "unknown option --devcies: perhaps you meant --devices?"),
        (["--optimizer", "adam"], "Perhaps you meant 'adamw'?"),
        (["--zzz", "4"], "unknown option --zzz: there is none of a similar name"),
    ],
)
def test_a_mistyped_option_is_told_in_a_line(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _status(["plan", "model.onnx", *words], monkeypatch) == 2
    error = capsys.readouterr().err
    assert told in error and len(error) < 130 and error.count("\n") == 1


def test_a_configuration_without_its_prefix_is_hinted_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text("{}", encoding="utf-8")
    for named in (path, tmp_path):
        assert _status(["plan", str(named), "--devices", "2"], monkeypatch) == 2
        assert f"or hf:{path} for a configuration's model" in capsys.readouterr().err


def test_the_object_of_an_error_has_no_infinite_numbers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(output, "_PRINTED", output._Printed())
    output.print_json_error(NoPlanFits("nothing", minimum=math.inf, memory_limit=8.0))
    printed = capsys.readouterr().out
    assert "Infinity" not in printed
    error = json.loads(printed)["error"]
    assert (error["minimum_memory"], error["memory_limit"]) == (None, 8.0)
