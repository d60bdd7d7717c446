"""Figures on disk: they save work of searches for other plans, and change none of them."""

from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.costmodel import load_cluster
from autopar.costmodel.known.shape import Shape
from autopar.costmodel.known.transformer import transformer
from autopar.errors import UsageError
from autopar.planning.model.figures import Figures
from autopar.planning.model.known_figures import KnownFigures
from autopar.planning.model.request import Request
from autopar.planning.outer_search.free_solutions import tables_of
from autopar.planning.remembered_figures import FigureFiles
from autopar.planning.remembered_plans import Searches
from autopar.remembered import FOLDER
from autopar.search import Sharing, Solution, sharing, sharing_orders

SHAPE = Shape(
    layers=2, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=4096, sequence=512, dropout=False
)
GRAPH = transformer(SHAPE, batch=2).graph
REQUEST = Request(cluster=load_cluster("dgx-h100").sized(2))
OTHERS = {"memory": replace(REQUEST, memory=2e9), "gap": replace(REQUEST, gap=0.1)}


@pytest.fixture(name="folder")
def folder_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "answers"
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


@pytest.fixture(name="made")
def figures_made(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The keys of figures that searches worked out."""
    keys: list[object] = []
    note = Figures.note

    def noted(self: Figures, key: object, *args: Any) -> None:
        keys.append(key)
        note(self, key, *args)

    monkeypatch.setattr(Figures, "note", noted)
    return keys


def planned(request: Request) -> str:
    return Searches(GRAPH, request).plan(request).to_json()


def test_another_plan_of_the_model_takes_fewer_figures(
    folder: Path, made: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(REQUEST)
    # Each of them begins with what all before it have worked out.
    told = {}
    for name, request in OTHERS.items():
        made.clear()
        told[name] = planned(request), len(made)
    assert len(list(folder.glob("figure-*"))) == 1
    monkeypatch.setenv(FOLDER, "")
    for name, request in OTHERS.items():
        made.clear()
        plan = planned(request)
        assert told[name][0] == plan
        assert told[name][1] < 0.5 * len(made), name


def _cut(text: str) -> str:
    return text[: len(text) // 2]


def _of_other_types(text: str) -> str:
    stored = json.loads(text)
    return json.dumps({key: ["[1, null]", basis] for key, (_, basis) in stored.items()})


def _on_other_orders(text: str) -> str:
    stored = json.loads(text)
    return json.dumps({key: [figure, {"0": "1"}] for key, (figure, _) in stored.items()})


def test_a_file_of_something_else_is_ignored(folder: Path, made: list[object]) -> None:
    other = OTHERS["gap"]
    right = planned(other)
    count = len(made)
    (file,) = folder.glob("figure-*")
    text = zlib.decompress(file.read_bytes()).decode()
    for damage in (_cut, _of_other_types, _on_other_orders, lambda text: '{"a": 1}'):
        for plan in folder.glob("plan-*"):
            plan.unlink()
        file.write_bytes(zlib.compress(damage(text).encode()))
        made.clear()
        assert planned(other) == right
        assert len(made) == count


def shared() -> Sharing:
    here = sharing()
    assert here is not None
    return here


def test_a_figure_holds_where_its_orders_hold(folder: Path) -> None:
    def search(order: int | None) -> tuple[float, int]:
        """A figure that rests on an order, and how often it was made."""
        count = 0

        def figure() -> float:
            nonlocal count
            count += 1
            return float(shared().by("order", int))

        known = KnownFigures(FigureFiles(("model",), ()))
        with sharing_orders():
            if order is not None:
                shared().put("order", order)
            value = known.of(REQUEST, hiding=False).once("key", figure, float)
            known.hand_on()
        return value, count

    assert search(1) == (1.0, 1)
    assert search(1) == (1.0, 0)
    assert search(2) == (2.0, 1)
    # It makes the order itself, so that it depends on more than what held before.
    assert search(None) == (0.0, 1)
    assert search(2) == (2.0, 0)


def test_numbers_are_read_as_they_were_written(folder: Path) -> None:
    for value in (0.1, math.inf, 1e-320, None):
        known = KnownFigures(FigureFiles(("model",), ()))
        with sharing_orders():
            figures = known.of(REQUEST, hiding=False)
            figures.once(("value", value), lambda value=value: value, float | None)
            known.hand_on()
        with sharing_orders():
            figures = KnownFigures(FigureFiles(("model",), ())).of(REQUEST, hiding=False)
            assert figures.known(("value", value), float | None) == (value,)


def test_a_figure_above_what_is_enough_is_worked_out_for_that_alone() -> None:
    figures = Figures()
    made = []

    def figure(enough: float) -> float:
        def make() -> float:
            made.append(enough)
            return min(5.0, enough)

        return figures.once_below(("key",), enough, make, lambda value: value, float)

    assert [figure(enough) for enough in (3.0, 9.0, 7.0, math.inf, 3.0)] == [
        3.0,
        5.0,
        5.0,
        5.0,
        3.0,
    ]
    assert made == [3.0, 9.0]
    assert figure(4.0) == 4.0


def test_choices_of_another_model_are_refused() -> None:
    tables: Any = SimpleNamespace(graph=SimpleNamespace(sizes=(2, 3)))
    for choices, right in (((1, 2), True), ((1, 3), False), ((-1, 0), False), ((1,), False)):
        solution = Solution(choices=choices, cost=1.0, memory=0.0, lower_bound=1.0, method="any")
        if right:
            assert tables_of(lambda: tables, solution) is tables
        else:
            with pytest.raises(UsageError, match="autopar cache clear"):
                tables_of(lambda: tables, solution)
