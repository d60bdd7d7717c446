"""Ring attention on real ranks: training equals one device, and the sends are those that are
priced.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from tests.end_to_end.parity import Subject, failures, subject
from tests.end_to_end.plans import request


@functools.cache
def _subject(name: str, folder: Path, train: bool) -> Subject:
    return subject(name, folder, train=train)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ONNX files would lie."""
    return tmp_path_factory.mktemp("models")


def _ring(model: Subject, sizes: tuple[int, ...]) -> Plan:
    """The plan in which every attention is a ring over the last axis, read back from its file."""
    wanted = request(sizes, train=model.train)
    assert wanted.mesh is not None
    attention = [op.name for op in model.model.graph.operators if "attention" in op.kind]
    assert attention
    pins = Pins(operators={name: {wanted.mesh.axes[-1].name: "k"} for name in attention})
    plan = Plan.model_validate_json(
        search_plan(model.model.graph, replace(wanted, limits=pins)).to_json()
    )
    assert all(plan.operators[name].strategy[-1] == "k" for name in attention)
    return plan


@pytest.mark.parametrize(
    ("name", "sizes"), [("gpt2", (4,)), ("llama", (2, 2)), ("bert", (2,))], ids=str
)
def test_training(name: str, sizes: tuple[int, ...], folder: Path) -> None:
    model = _subject(name, folder, True)
    plan = _ring(model, sizes)
    sends = [c for c in plan.collectives if c.kind == "send"]
    layers = 2
    size = sizes[-1]
    assert len(sends) == layers * ((size - 1) + 2 * size - 1)
    assert not failures(model, request(sizes, train=True), [("ring", plan)])


def test_inference(folder: Path) -> None:
    model = _subject("gpt2", folder, False)
    assert not failures(model, request((4,), train=False), [("ring", _ring(model, (4,)))])
