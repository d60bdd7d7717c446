"""The benchmark of the numbers of effort: a weaker setting of each, patched and put back."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace

import pytest

from autopar.planning.bounds import proof
from autopar.planning.model import effort
from autopar.planning.model.effort import EFFORT, Effort
from autopar.planning.outer_search import neighbours
from benchmarks import ablation
from benchmarks.ablated import cases
from benchmarks.ablated.weaker import WEAKER, Watched, patched
from benchmarks.ablation import Ablation, Outcome, Row
from benchmarks.planned.cases import Case

TINY = Case(name="tiny", model="small", layers=1, batch=2, devices=2)
FULL = Outcome(step=1.0, gap=0.01, cpu_s=2.0)


def test_every_number_has_a_weaker_setting() -> None:
    assert list(WEAKER) == [field.name for field in fields(Effort)]
    assert all(getattr(EFFORT, name) != weaker for name, weaker in WEAKER.items())


def test_numbers_are_patched_in_every_module_and_put_back() -> None:
    other = replace(EFFORT, split=1)
    with pytest.raises(KeyError), patched(other):
        assert neighbours.EFFORT is proof.EFFORT is effort.EFFORT is other  # type: ignore[attr-defined]
        raise KeyError
    assert neighbours.EFFORT is proof.EFFORT is effort.EFFORT is EFFORT  # type: ignore[attr-defined]


def test_numbers_that_are_read_are_known() -> None:
    watched = Watched(EFFORT)
    assert watched.close == EFFORT.close and watched.read == {"close"}


def test_the_cases() -> None:
    large = [case.devices for case in cases.CASES if not case.quick]
    assert len(large) >= 24 and (min(large), max(large)) == (8, 1024)
    assert len(cases.CASES) == len(large) + 4 == len(cases.CASES_BY_NAME)


def row(*outcomes: Outcome) -> Row:
    """A number over cases that have all `FULL` with it."""
    return Row(
        number="close",
        ablations=tuple(
            Ablation(case=str(i), number="close", full=FULL, weaker=weaker, read=True)
            for i, weaker in enumerate(outcomes)
        ),
    )


def test_what_earns() -> None:
    slower = replace(FULL, step=1.002)
    faster = replace(FULL, step=0.99)
    wider = replace(FULL, gap=0.012)
    lost = Outcome(step=math.inf, gap=math.inf, cpu_s=1.0)
    assert not row(FULL, replace(FULL, step=1.0005, gap=0.0105)).earns
    assert row(FULL, wider).earns and row(FULL, wider).largest_gap == pytest.approx(0.002)
    both = row(slower, faster)
    assert both.largest.case == "1" and both.mean_step == pytest.approx(-0.004) and both.earns
    none = row(slower, lost)
    assert none.earns and none.mean_step == pytest.approx(0.002) and none.cpu_s == (4.0, 3.0)
    assert none.as_json()["largest_step"] is none.as_json()["largest_gap"] is None


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ablation, "CASES", (TINY,))
    monkeypatch.setattr(ablation, "CASES_BY_NAME", {"tiny": TINY})
    ablation.main(["--numbers", "margin", "--json"])
    written = json.loads(capsys.readouterr().out)
    (case,) = written["cases"]
    (number,) = written["numbers"]
    assert case["case"] == "tiny" and case["step_s"] > 0.0 and case["gap"] >= 0.0
    assert (number["number"], number["value"], number["weaker"]) == (
        "margin",
        EFFORT.margin,
        WEAKER["margin"],
    )
    assert number["read"] == 1 and number["cases"]["tiny"]["step_s"] > 0.0
    ablation.show_case(TINY, FULL)
    ablation.show_rows([row(FULL)])
    assert "nothing" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        ablation.main(["--numbers", "close,margins"])
    assert "Perhaps you meant 'margin'?" in capsys.readouterr().err
