"""The benchmark of stalls: its command line, its rows, and that plans are kept."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from autopar.costmodel.step.reasons import Reason
from benchmarks import stalls
from benchmarks.planned.cases import Case


def test_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        Case(name="one", model="small", devices=2, batch=16),
        Case(name="two", model="small", devices=2, batch=16, stages=2),
    ]
    monkeypatch.setattr(stalls, "CASES_BY_NAME", {case.name: case for case in small})
    stalls.main(["--plans", str(tmp_path), "--json"])
    one, two = map(json.loads, capsys.readouterr().out.splitlines())
    for told in (one, two):
        beside = math.fsum(told[reason.value] for reason in Reason)
        assert beside + told["computation"] == pytest.approx(told["step"])
    assert one["earlier"] > 0.0 and two["earlier"] is None
    assert two["found"]["stages"] == 2
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert set(made) == {"one.json", "two.json"}
    stalls.main(["--plans", str(tmp_path)])
    head, rule, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 and rows[0].startswith("| one | 1 x ")
    assert len({line.count("|") for line in (head, rule, *rows)}) == 1
    assert made == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_there_are_24_cases_of_every_kind() -> None:
    assert len(stalls.CASES) == len({case.name for case in stalls.CASES}) == 24
    assert {case.devices for case in stalls.CASES} >= {8, 1024}
    assert {case.cluster for case in stalls.CASES} == {stalls.H100, stalls.A100}
