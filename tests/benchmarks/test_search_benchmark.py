"""The benchmark of the search: its rows, its curves and its command line, on small graphs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.ir import Graph
from autopar.search import CostGraph, solve
from benchmarks import search
from benchmarks.searching import rivals
from benchmarks.searching.curves import panels, point
from benchmarks.searching.models import Model, analysed, built_in, cost_graph, public
from benchmarks.searching.rivals import RIVALS, LeftOut, Row, race


def chain(count: int, size: int) -> CostGraph:
    """Random tables along a line."""
    draw = np.random.default_rng(count)
    edges = {(i, i + 1): draw.random((size, size)) for i in range(count - 1)}
    return CostGraph(
        sizes=(size,) * count, unary=tuple(draw.random(size) for _ in range(count)), edges=edges
    )


def test_every_rival_finds_the_optimum_of_a_chain() -> None:
    graph = chain(5, 4)
    rows = race("chain", "4", graph, seconds=10.0, rivals=RIVALS)
    assert [row.rival for row in rows] == list(RIVALS)
    for row in rows:
        assert row.ours_cost == solve(graph).cost and row.ours_gap == 0.0
        assert row.verdict == "equal" and row.rival_s is not None and row.ours_s >= 0.0
        written = row.as_json()
        assert {
            "model",
            "mesh",
            "rival",
            "ours_s",
            "rival_s",
            "ours_cost",
            "rival_cost",
        } <= written.keys()


def test_what_a_rival_cannot_do_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "COLUMNS", 10)
    monkeypatch.setattr(rivals, "ENUMERABLE", 10)
    highs, enumeration = race(
        "chain", "4", chain(5, 4), seconds=10.0, rivals=("highs", "exhaustive")
    )
    assert (highs.rival_cost, highs.rival_s, highs.ratio, highs.verdict) == (None, None, None, "-")
    assert "columns are too many" in highs.note and "assignments are too many" in enumeration.note


def test_out_of_time() -> None:
    draw = np.random.default_rng(0)
    wide = CostGraph(
        sizes=(9,) * 12,
        unary=(np.zeros(9),) * 12,
        edges={(u, v): draw.random((9, 9)) for v in range(12) for u in range(v)},
    )
    ours = solve(chain(2, 2))
    row = rivals.against_highs("clique", "-", wide, 0.1, ours, 0.05)
    assert row.note == "out of time" and row.rival_s is not None


def test_verdicts() -> None:
    row = Row(
        model="m",
        mesh="8",
        rival="r",
        ours_s=0.1,
        rival_s=20.0,
        ours_cost=1.0,
        rival_cost=1.0 + 1e-9,
        ours_gap=0.0,
    )
    assert row.verdict == "equal" and row.ratio == pytest.approx(200.0)
    worse = Row(
        model="m",
        mesh="8",
        rival="r",
        ours_s=0.1,
        rival_s=0.2,
        ours_cost=1.1,
        rival_cost=1.0,
        ours_gap=0.0,
    )
    assert worse.verdict == "+10.00%"


def test_built_in_models_have_cost_graphs() -> None:
    for model in built_in(quick=True):
        graph = cost_graph(analysed(model.load()), (2, 2))
        assert graph.digits is not None and solve(graph).gap < 1e-9


def test_joins_grow_with_the_logarithm_of_the_layers() -> None:
    few = point("layers", 8, 8, (2, 2))
    many = point("layers", 64, 64, (2, 2))
    assert many.variables > 7 * few.variables
    assert many.joins <= few.joins + 30
    assert few.gap == many.gap == 0.0


def test_folded_graphs_do_not_grow_with_the_layers() -> None:
    few = point("folded", 8, 8, (2, 2))
    many = point("folded", 64, 64, (2, 2))
    assert few.variables == many.variables < point("layers", 8, 8, (2, 2)).variables
    assert few.joins == many.joins


def test_what_cannot_be_searched_is_left_out() -> None:
    def broken() -> Graph:
        raise KeyError("a key of theirs")

    models = [Model(name="broken", load=broken), built_in(quick=True)[0]]
    unread, fast, unlaid = search.rows(models, ["2x2", "2x"], ["recursive_programming"], 1.0)
    assert isinstance(unread, LeftOut) and (unread.mesh, unread.why) == (
        "",
        "KeyError: 'a key of theirs'",
    )
    assert isinstance(fast, Row) and isinstance(unlaid, LeftOut)
    search.show_row(unlaid)


def test_the_summary_says_the_largest_gap(capsys: pytest.CaptureFixture[str]) -> None:
    row = Row(
        model="m",
        mesh="2x2",
        rival="recursive_programming",
        ours_s=0.1,
        rival_s=0.2,
        ours_cost=1.0,
        rival_cost=1.0,
        ours_gap=0.0,
    )
    rows = [row, replace(row, rival_cost=1.0 + 1e-9), replace(row, rival_cost=1.0025)]
    search.show_summary(rows)
    assert "largest gap to ours 0.2500%, none in 2 of 3" in capsys.readouterr().out


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "--quick",
        "--only",
        "gpt3-175b/2 layers",
        "--meshes",
        "4",
        "--plots",
        str(tmp_path),
        "--no-curves",
    ]
    search.main([*arguments, "--json"])
    written = json.loads(capsys.readouterr().out)
    assert {row["rival"] for row in written["rows"]} == set(RIVALS) and written["curves"] == []
    assert ElementTree.parse(tmp_path / "search.svg").getroot().tag.endswith("svg")
    search.main(arguments)
    printed = capsys.readouterr().out
    assert "highs, 1 axis: 1 of 1 finished, 1 equal" in printed and "gpt3-175b/2 layers" in printed


def test_panels_of_curves() -> None:
    points = [point("layers", layers, layers, (2,)) for layers in (1, 2)]
    points += [point("folded", layers, layers, (2,)) for layers in (4, 8)]
    seconds, joins = panels([], points)
    assert (seconds.title, joins.title) == ("CPU seconds over layers", "distinct joins over layers")
    assert [series.name for series in seconds.series[3:]] == [
        "tables (folded)",
        "search, first (folded)",
    ]
    search.show_points(points)


def test_without_rows(capsys: pytest.CaptureFixture[str]) -> None:
    search.main(["--no-rows", "--no-curves", "--json"])
    assert json.loads(capsys.readouterr().out) == {"rows": [], "curves": [], "left_out": []}


def test_an_unknown_rival_lists_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        search.main(["--rivals", "gurobi"])
    assert "highs" in capsys.readouterr().err


def test_models_of_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"public_models\.py"):
        public(tmp_path, full=False)
    (tmp_path / "public_models.py").write_text(
        "import torch\nMODELS = {'line': None}\nONNX = {'file': ''}\n"
        "def build(name, variant):\n    return torch.nn.Sequential(torch.nn.Linear(8, 8)), "
        "(torch.zeros(4, 8),)\n"
    )
    [line] = public(tmp_path, full=False)
    assert line.name == "line" and solve(cost_graph(analysed(line.load()), (2,))).gap == 0.0
    assert [model.name for model in public(tmp_path, full=True)] == ["line", "onnx file"]
