"""The comparison with the planners of others.

Its measure of a process, its rows, and its page.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import planners
from benchmarks.planners_of_others import races
from benchmarks.planners_of_others.ours import CASES
from benchmarks.planners_of_others.processes import Measured, measured
from benchmarks.planners_of_others.races import RACES, Race
from benchmarks.planners_of_others.table import BEGIN, END, section, with_section

RACE = Race(
    rival="ours-again",
    solver="none",
    model="two layers",
    devices="8",
    program="of_it.py",
    arguments=("1.5",),
    ours="two",
    remark="both guess",
)
OURS = Measured(seconds=2.0, memory=3.0 * 2**30, said="STEP 0.5")


def test_cpu_seconds_peak_and_the_last_figure_of_a_process(tmp_path: Path) -> None:
    code = "print('STEP 1e-3'); x = bytearray(64 * 2**20); print('STEP 1.5 s'); sum(range(10**6))"
    done = measured([sys.executable, "-c", code], tmp_path, 60.0)
    assert done.number("STEP") == 1.5 and done.why == ""
    assert done.seconds > 0.0 and done.memory > 64 * 2**20


@pytest.mark.parametrize(
    ("code", "limit", "why"),
    [
        ("raise SystemExit('no such profile')", 60.0, "no such profile"),
        ("import time; time.sleep(60)", 0.5, "stopped after 0 s"),
    ],
)
def test_a_process_that_fails_or_is_late_says_why(
    tmp_path: Path, code: str, limit: float, why: str
) -> None:
    assert measured([sys.executable, "-c", code], tmp_path, limit).why == why


def test_a_rival_that_fails_has_no_step_and_no_ratio() -> None:
    theirs = Measured(seconds=4.0, memory=2.0**30, said="STEP 9", why="no room")
    row = races.row_of(RACE, theirs, OURS)
    assert (row.rival_s, row.rival_step_s, row.ratio) == (None, None, None)
    assert row.ours_step_s == 0.5 and row.remark == "both guess; it failed: no room"


def test_each_rival_runs_beside_us_once_and_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "races" / "programs"
    programs.mkdir(parents=True)
    (programs / "of_it.py").write_text("import sys; print('STEP', sys.argv[1])", encoding="utf-8")
    (programs.parent / "ours.py").write_text("print('STEP', 0.5)", encoding="utf-8")
    monkeypatch.setattr(races, "PROGRAMS", programs)
    checkouts = {"ours-again": tmp_path}
    (row,) = races.rows((RACE,), checkouts, sys.executable, 60.0, {})
    assert (row.ours_step_s, row.rival_step_s, row.remark) == (0.5, 1.5, "both guess")
    assert row.rival_s is not None and row.ours_s is not None
    assert row.ratio == row.rival_s / row.ours_s > 0.0
    assert list(races.rows((RACE,), {}, sys.executable, 60.0, {})) == []
    file = tmp_path / "rows"
    planners.remember(file, row, {})
    planners.remember(file, row, {row.key: row})
    known = planners.rows_of(file)
    assert known == {row.key: row}
    assert list(races.rows((RACE,), checkouts, "no python", 60.0, known)) == [row]


def test_rows_of_highs_are_of_the_searches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = {"rival_s": 3.0, "rival_cost": 0.2, "ours_s": 0.01, "ours_cost": 0.2, "note": "late"}
    said = json.dumps({"rows": [{"model": "two layers", "mesh": "2x4"} | figures]})
    asked: list[str] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        asked.extend(command)
        return subprocess.CompletedProcess(command, 0, said, "")

    monkeypatch.setattr(subprocess, "run", run)
    (row,) = races.rows_of_highs(("2x4",), "two layers", 9.0)
    assert (row.rival, row.devices, row.remark, row.rival_memory) == ("highs", "2x4", "late", None)
    assert row.ratio == pytest.approx(300.0) and row.rival_step_s == row.ours_step_s == 0.2
    assert asked[-2:] == ["--meshes", "2x4"] and "9.0" in asked


def test_the_table_has_its_place_in_a_page(tmp_path: Path) -> None:
    (tmp_path / "COMMIT").write_text("0123456789abcdef\n", encoding="utf-8")
    theirs = Measured(seconds=4.0, memory=2.0**30, said="STEP 1234")
    text = section([races.row_of(RACE, theirs, OURS)], {"ours-again": tmp_path})
    page = with_section(f"before\n{BEGIN}\nold\n{END}\nafter\n", text)
    row = "| ours-again | none | two layers | 8 | 4 | 1 | 1234 | 2 | 3 | 0.5 | 2 | both guess |"
    assert page.startswith("before\n") and page.endswith("\nafter\n") and "old" not in page
    assert row in page and "ours-again at `0123456789ab`" in page
    with pytest.raises(ValueError, match="lacks the marks"):
        with_section("no place", text)


def test_every_race_has_a_program_and_a_model_of_ours() -> None:
    for race in RACES:
        assert race.ours in CASES
        assert (races.PROGRAMS / race.program).exists()
        assert race.rival in planners.CHECKOUTS
    names = {(race.rival, race.solver, race.model, race.devices) for race in RACES}
    assert len(names) == len(RACES)
