"""Attention of imported models whose masks are known: causal ones in a ring and by heads, windows
under every scheme, on real ranks, against one device.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from autopar.ir.recipes import ATTENTIONS
from autopar.plan import Plan
from tests.end_to_end.parity import Subject, failures, subject
from tests.end_to_end.plans import NamedPlans, random_plans, request
from tests.end_to_end.test_schedules import under_schedule


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where files of models would lie."""
    return tmp_path_factory.mktemp("models")


@functools.cache
def _subject(name: str, folder: Path) -> Subject:
    return subject(name, folder, train=True)


def _strategies(plan: Plan) -> set[tuple[str, ...]]:
    """The strategies of the attentions of a plan."""
    return {op.strategy for op in plan.operators.values() if op.kind in ATTENTIONS}


@pytest.mark.parametrize(
    "name", ["llama_exact", pytest.param("mistral_window", marks=pytest.mark.slow)]
)
def test_schemes(name: str, folder: Path) -> None:
    model = _subject(name, folder)
    assert all(
        len(op.inputs) == 3 and ("window" in op.attributes) == (name == "mistral_window")
        for op in model.model.graph.operators
        if op.kind in ATTENTIONS
    )
    wanted = request((2,), train=True)
    named = NamedPlans(model.model, wanted)
    assert _strategies(named["context"]) == {("k",)}, "keys are split with the queries, in a ring"
    tried = {
        scheme: named[scheme] for scheme in ("found", "data", "megatron-sp", "ulysses", "context")
    }
    tried["context 2"] = under_schedule(named["context"], micro_batches=2)
    chances = random_plans(model.model, wanted, count=2)
    assert not failures(model, wanted, [*tried.items(), *chances])
