"""The benchmark of faults: that it runs, notices what is wrong, and ends accordingly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.faulting import disturbing, moving
from benchmarks.faulting.trainings import EXPERTS, expert_products, plan_of, text


def test_the_plans_are_what_their_names_say() -> None:
    """All ranks work in each, and experts are split where that is said."""
    for scheme, ranks in faults.PLANS:
        assert plan_of("dense", scheme, ranks).devices == ranks
    plan = plan_of("experts", "experts split", 4)
    assert [plan.operators[name].strategy for name in expert_products("experts")] == [
        ("e",),
        ("e",),
    ]
    assert {plan.parameters[name].storage for name in ("experts_up", "experts_down")} == {
        "S0"
    } and EXPERTS["experts"] % 8 == 0
    assert len(text()) > 100_000


def test_what_goes_wrong_is_noticed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(disturbing.FAULTS, "rank killed", lambda run: "ranks were left behind")
    monkeypatch.setattr(faults, "QUICK", ("rank killed",))
    assert faults.main(["--quick", "--json", "--parts", "faults"]) == 1
    assert json.loads(capsys.readouterr().out)["faults"][0]["wrong"] == "ranks were left behind"
    with pytest.raises(SystemExit):
        faults.main(["--parts", "none"])
    assert "unknown part 'none': valid are faults, moves" in capsys.readouterr().err


def test_curves_are_compared() -> None:
    one = {0: (1.0, [1]), 1: (2.0, [2])}
    assert moving.compared("x", one, {0: (1.0, [1]), 1: (2.00001, [2])}).wrong == ""
    assert "losses differ" in moving.compared("x", one, {0: (1.0, [1]), 1: (2.001, [2])}).wrong
    assert "samples" in moving.compared("x", one, {0: (1.0, [1]), 1: (2.0, [3])}).wrong
    assert "samples" in moving.compared("x", one, {0: (1.0, [1])}).wrong


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("part", ["faults", "moves", "saves", "cost", "long"])
def test_a_quick_run(part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert faults.main(["--quick", "--json", "--parts", part]) == 0
    (rows,) = json.loads(capsys.readouterr().out).values()
    assert rows and not any(row.get("wrong") for row in rows)
