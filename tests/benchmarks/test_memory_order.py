"""The benchmark of memories: what counts as out of order, and its command line."""

from __future__ import annotations

import math

import pytest

from benchmarks import memory_order
from benchmarks.memory_order import LAYERS, Row, drawn, planned


def row(*steps: float) -> Row:
    shares = (0.5, 0.8, math.inf)
    return Row(seed=1, name="width 128", shares=shares, steps=steps, seconds=3.0)


@pytest.mark.parametrize(
    ("steps", "broken"),
    [
        ((math.inf, 2.0, 1.0), 0),
        ((1.005, 1.008, 1.0), 0),
        ((1.0, 1.02, 1.0), 1),
        ((1.0, 1.02, 1.03), 2),
        ((1.0, math.inf, 1.0), 1),
    ],
)
def test_a_plan_of_more_memory_is_not_slower(steps: tuple[float, ...], broken: int) -> None:
    assert len(row(*steps).broken) == broken


def test_what_breaks_the_order_is_told() -> None:
    assert row(1.0, 1.5, 1.0).broken == ["seed 1, width 128: +50.00% at 0.800 beside 0.500"]


def test_models_are_drawn_alike() -> None:
    name, graph, request = drawn(3, 8)
    again, same, _ = drawn(3, 8)
    assert name == again and len(graph.operators) == len(same.operators)
    assert request.cluster.devices == 8 and LAYERS == 4


def test_a_model_within_rising_memories() -> None:
    of_two = planned(104, 2)
    assert len(of_two.shares) == len(of_two.steps) == 6 and of_two.broken == []
    assert list(of_two.shares) == sorted(of_two.shares)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed",
    [
        pytest.param(47, id="a cut is moved by a layer, where one by a piece is slower"),
        pytest.param(105, id="a thriftier solution is the faster program, where memory is ample"),
        pytest.param(139, id="the program of one micro-batch lacks memory, its tables do not"),
        pytest.param(86, id="programs of a front differ more than its tables"),
    ],
)
def test_more_memory_is_not_slower(seed: int) -> None:
    assert planned(seed, 8).broken == []


def test_the_command_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(2.0, 1.0, 1.0), row(1.0, 1.5, 1.0)]
    monkeypatch.setattr(memory_order, "planned", lambda seed, devices: rows[seed])
    assert memory_order.main(["--models", "1"]) == 0
    assert memory_order.main(["--models", "2", "--devices", "4"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == (
        "6 cases of 2 models, 1 out of order; 1.00 CPU s each"
    )
