"""Sequences split over real ranks, with attention as a ring and recurrences that pass states on:
training equals one device, and the collectives are those that are priced.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from tests.end_to_end.parity import Subject, failures, subject
from tests.end_to_end.plans import request
from tests.end_to_end.recurrent_models import RECURRENT


@functools.cache
def _subject(name: str, folder: Path, train: bool) -> Subject:
    return subject(name, folder, train=train)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where ONNX files would lie."""
    return tmp_path_factory.mktemp("models")


SEQUENCE = {
    "aten.scaled_dot_product_attention.default": "k",
    "autopar.causal_conv1d": "y0",
    "autopar.gated_delta_rule.default": "t",
    "autopar.state_space_scan.default": "t",
}
"""Operators in which places of a sequence meet, and their factor of it."""


def _split(model: Subject, sizes: tuple[int, ...]) -> Plan:
    """The plan in which the last axis splits all sequences, read back from its file."""
    wanted = request(sizes, train=model.train)
    assert wanted.mesh is not None
    axis = wanted.mesh.axes[-1].name
    factors = {
        op.name: SEQUENCE[op.kind] for op in model.model.graph.operators if op.kind in SEQUENCE
    }
    assert factors
    pins = Pins(operators={name: {axis: factor} for name, factor in factors.items()})
    plan = Plan.model_validate_json(
        search_plan(model.model.graph, replace(wanted, limits=pins)).to_json()
    )
    assert all(plan.operators[name].strategy[-1] == factors[name] for name in factors)
    return plan


@pytest.mark.parametrize(
    ("name", "sizes"), [("gpt2", (4,)), ("llama", (2, 2)), ("bert", (2,))], ids=str
)
def test_training(name: str, sizes: tuple[int, ...], folder: Path) -> None:
    model = _subject(name, folder, True)
    plan = _split(model, sizes)
    sends = [c for c in plan.collectives if c.kind == "send"]
    layers = 2
    size = sizes[-1]
    assert len(sends) == layers * ((size - 1) + 2 * size - 1)
    assert not failures(model, request(sizes, train=True), [("sequences", plan)])


def test_inference(folder: Path) -> None:
    model = _subject("gpt2", folder, False)
    assert not failures(model, request((4,), train=False), [("sequences", _split(model, (4,)))])


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", RECURRENT)
def test_states_are_passed_on(name: str, sizes: tuple[int, ...], folder: Path) -> None:
    model = _subject(name, folder, True)
    plan = _split(model, sizes)
    operators = model.model.graph.operators
    kinds = [plan.operators[op.name].strategy[-1] for op in operators if op.kind in SEQUENCE]
    sent = Counter(collective.kind for collective in plan.collectives)
    # Each convolution's border rows go to the next rank, and their gradients come back; a ring of
    # p ranks sends p - 1 blocks there and 2 p - 1 back.
    assert sent["send"] == 2 * kinds.count("y0") + (3 * sizes[-1] - 2) * kinds.count("k")
    # States are gathered, and their gradients are scattered.
    assert min(sent["all_gather"], sent["reduce_scatter"]) >= kinds.count("t") > 0
    assert not failures(model, request(sizes, train=True), [("sequences", plan)])
