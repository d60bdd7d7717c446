"""Rules that a plan file holds: proven by executing the operator before they are used; others are
refused before any rank starts.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cli import run
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.sharding.rules import RULES
from tests.operators.own_ops import build

MODEL = "tests.operators.own_ops:build"
MIXED = "autopar_tests.mixed.default"
CENTRED = "autopar_tests.centred.default"


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan with three found rules."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    before = dict(RULES)
    pins = ("gated=rank:b", "mixed=rank:b")
    autopar.plan(*build(), devices=2, cluster="local-cpu", discover=True, stages=1, pins=pins).save(
        path
    )
    RULES.clear()
    RULES.update(before)
    return path


def tampered(honest: Path, kind: str, **columns: Any) -> Path:
    """The plan with other columns in the rule of one operator."""
    data = json.loads(honest.read_text())
    (rule,) = [rule for rule in data["rules"] if rule["kind"] == kind]
    assert {name: rule[name] for name in columns} != columns
    rule.update(columns)
    path = honest.parent / "tampered.json"
    path.write_text(json.dumps(data))
    return path


TAMPERED: dict[str, tuple[str, dict[str, Any], str]] = {
    "a whole dim is split": (CENTRED, {"rule": "a b -> a b"}, "is not what the operator computes"),
    "a sum is lost": (
        MIXED,
        {"rule": "a !b, !b c, c -> a c", "linear": [[0], [1], [2]]},
        "is not what the operator computes",
    ),
    "a sum becomes a mean": (
        MIXED,
        {"rule": "a b, b c, +c -> a c | b: mean"},
        "is not what the operator computes",
    ),
    "no gradient": (MIXED, {"differentiable": False}, "said to be not differentiable"),
    "no rule": (MIXED, {"rule": "a b ->"}, "bad rule"),
    "linear in what is no input": (MIXED, {"linear": [[7]]}, "linear names"),
}
USES: dict[str, Callable[[Path], object]] = {
    "run": lambda path: run(["run", str(path), "--model", MODEL]),
    "parallelize": lambda path: autopar.parallelize(build()[0], path, build()[1]),
    "plan": lambda path: autopar.plan(*build(), devices=2, cluster="local-cpu", load=path),
    "explain": lambda path: run(["explain", str(path), "--model", MODEL]),
}


@pytest.mark.parametrize("name", TAMPERED)
def test_a_tampered_rule_is_refused(
    name: str, honest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, columns, words = TAMPERED[name]
    path = tampered(honest, kind, **columns)
    _no_ranks(monkeypatch)
    with pytest.raises(PlanError, match=words) as caught:
        USES["parallelize"](path)
    assert kind in str(caught.value) and kind not in RULES


@pytest.mark.parametrize("use", USES)
def test_wherever_it_is_used(use: str, honest: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tampered(honest, CENTRED, rule="a b -> a b")
    _no_ranks(monkeypatch)
    with pytest.raises(PlanError, match=rf"{CENTRED}.*(--discover|discover=True)"):
        USES[use](path)
    assert CENTRED not in RULES


def test_a_rule_for_other_calls_is_not_taken(honest: Path) -> None:
    """A rule for which no operator of the model can be executed stays out of the table."""
    data = json.loads(honest.read_text())
    data["rules"].append(
        {"kind": "autopar_tests.other.default", "signature": "0" * 16, "rule": "a b -> a b"}
    )
    path = honest.parent / "more.json"
    path.write_text(json.dumps(data))
    autopar.plan(*build(), devices=2, cluster="local-cpu", load=path)
    assert "autopar_tests.other.default" not in RULES and MIXED in RULES


def test_an_honest_rule_is_proven_once_and_runs(
    honest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import autopar.runtime.discovery as discovery

    proven: list[str] = []
    prove = discovery.prove_call
    monkeypatch.setattr(
        discovery,
        "prove_call",
        lambda entry, call, constants: (
            proven.append(call.operator.kind) or prove(entry, call, constants)
        ),
    )
    state = torch.get_rng_state()
    for _ in range(2):
        plan = autopar.plan(*build(), devices=2, cluster="local-cpu", load=honest)
    assert sorted(proven) == sorted(rule.kind for rule in plan.rules) and len(plan.rules) == 3
    assert torch.equal(state, torch.get_rng_state())
    run(["run", str(honest), "--model", MODEL, "--check"])


def test_a_rule_of_the_user_is_kept(honest: Path) -> None:
    autopar.register_rule(CENTRED, "* !w -> * !w")
    entry = RULES[CENTRED]
    autopar.plan(*build(), devices=2, cluster="local-cpu", load=Plan.load(honest))
    assert RULES[CENTRED] is entry


def _no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a rank is started")

    for place in ("autopar.runtime.run.run_ranks", "autopar.runtime.parallelize.join_world"):
        monkeypatch.setattr(place, start)
