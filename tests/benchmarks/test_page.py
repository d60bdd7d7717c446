"""The page of published runs: its table, what got worse, and the figures that it is held to."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from benchmarks.validating.groups import all_groups
from benchmarks.validating.page import changed, figures_of, worse, write_page
from benchmarks.validating.scores import Group, Sample, score

ROOT = Path(__file__).resolve().parents[2]
DATA = os.environ.get("AUTOPAR_PUBLISHED_RUNS", "")
"""A folder with the measurements of docs/published-runs.md."""


def group(name: str, predicted: float, **given: object) -> Group:
    """A group of one row, measured at one second."""
    row = Sample(label="", measured=1.0, predicted=predicted, **given)  # type: ignore[arg-type]
    return Group(name=name, samples=(row,), left_out={"not given: dp": 2})


def test_the_page_tells_what_a_group_has_seen_and_leaves_open(tmp_path: Path) -> None:
    one = group("bloom", 1.25, open=("network",))
    page = tmp_path / "page.md"
    write_page(page, [(one, score(one), "Calculon 31.0%")])
    text = page.read_text(encoding="utf-8")
    row = next(line for line in text.splitlines() if line.startswith("| bloom |"))
    assert "| 25.0 % |" in row and "| network | - | network 1 | - |" in row
    assert "- bloom: 2, not given: dp." in text and text.endswith("Nothing.\n")
    assert json.loads((tmp_path / "page.json").read_text()) == {"bloom": {"mean_error": 0.25}}


def test_the_next_page_tells_what_got_worse(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for predicted in (1.1, 1.2):
        one = group("sc21_t1", predicted)
        write_page(page, [(one, score(one), "-")])
    text = page.read_text(encoding="utf-8")
    assert "- sc21_t1: mean error 10.0% before, 20.0% now." in text
    assert "| sc21_t1 | 1 | 20.0 % | 10.0 % |" in text, "the present error beside the last one"


def test_runs_are_set_beside_what_they_are_without_a_profile(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    groups = [group("a", 1.1), group("b", 0.7)]
    plain = [group("a without its profile", 1.3), group("b without its profile", 0.9)]
    write_page(page, [(one, score(one), "-") for one in (*groups, *plain)])
    text = page.read_text(encoding="utf-8")
    assert "| a | 10.0 % | 30.0 % |" in text and "| b | 30.0 % | 10.0 % |" in text
    assert "| mean of the sources | 20.0 % | 20.0 % |" in text


def test_worse_depends_on_the_figure() -> None:
    before = {"a": {"mean_error": 0.1, "oom_accuracy": 0.9}, "b": {"mean_error": 0.2}}
    now = {"a": {"mean_error": 0.105, "oom_accuracy": 0.8}}
    assert worse(before, now) == ["b is gone", "a: oom accuracy 90.0% before, 80.0% now"]
    assert len(changed(before, now)) == 2 and changed(before, before) == []


@pytest.mark.slow
@pytest.mark.skipif(not DATA, reason="AUTOPAR_PUBLISHED_RUNS names no folder")
def test_the_figures_of_the_page_are_those_of_the_model() -> None:
    """Within one point, whatever changed; the page is made anew where this fails."""
    groups, _ = all_groups(Path(DATA))
    written = json.loads((ROOT / "docs" / "published-runs.json").read_text(encoding="utf-8"))
    assert changed(written, figures_of({group.name: score(group) for group in groups})) == []
