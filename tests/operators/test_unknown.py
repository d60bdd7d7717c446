"""Operators without a rule: all named at once, or computed whole on every device where the user
asks for it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar.cli import run
from autopar.errors import UnsupportedOperators
from autopar.frontends.load import ModelOptions, load_model
from autopar.plan import Plan
from autopar.sharding.analysis import analyse
from tests.operators.own_ops import build
from tests.operators.ranks import require_parity

MODEL = "tests.operators.own_ops:build"
KINDS = (
    "autopar_tests.centred.default",
    "autopar_tests.gated.default",
    "autopar_tests.mixed.default",
)
TWO = ("--cluster", "local-cpu", "--devices", "2")


def test_all_are_named_with_what_to_do() -> None:
    with pytest.raises(UnsupportedOperators) as caught:
        autopar.plan(*build(), devices=2, cluster="local-cpu")
    assert caught.value.counts == dict.fromkeys(KINDS, 1) and caught.value.exit_code == 3
    for word in (*KINDS, "register_rule", "discover=True", "replicate_unknown=True"):
        assert word in str(caught.value)


def test_replicated_operators_are_planned_and_run(tmp_path: Path) -> None:
    plan = autopar.plan(
        *build(),
        devices=2,
        cluster="local-cpu",
        replicate_unknown=True,
        stages=1,
        pins=("up/linear=rank:n", "pow=rank:d1"),
    )
    assert plan.replicated == KINDS
    for name in ("gated", "mixed", "centred"):
        held = plan.operators[name]
        assert held.strategy == ("R",) and {
            layout for _, layout in (*held.inputs, *held.outputs)
        } == {"R"}
    assert plan.operators["up/linear"].strategy == ("n",)
    plan.save(tmp_path / "plan.json")
    require_parity(Plan.load(tmp_path / "plan.json"))


def test_replication_is_for_the_plan_that_asked() -> None:
    module, inputs = build()
    plan = autopar.plan(module, inputs, devices=2, cluster="local-cpu", replicate_unknown=True)
    with pytest.raises(UnsupportedOperators):
        autopar.plan(module, inputs, devices=2, cluster="local-cpu")
    assert autopar.plan(module, inputs, devices=2, cluster="local-cpu", load=plan) == plan
    autopar.register_rule(KINDS[1], "* h, h -> * h")
    fresh = autopar.plan(module, inputs, devices=2, cluster="local-cpu", replicate_unknown=True)
    assert fresh.replicated == (KINDS[0], KINDS[2])


def test_a_model_that_knows_all_its_operators_replicates_nothing() -> None:
    import torch

    plan = autopar.plan(
        torch.nn.Linear(8, 8),
        (torch.zeros(8, 8),),
        devices=2,
        cluster="local-cpu",
        replicate_unknown=True,
        discover=True,
    )
    assert plan.replicated == () and plan.rules == ()


def test_the_command_line_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved = str(tmp_path / "plan.json")
    run(["plan", MODEL, *TWO, "--replicate-unknown", "-o", saved])
    shown = capsys.readouterr()
    assert all(kind in shown.err and kind in shown.out for kind in KINDS)
    run(["run", saved, "--model", MODEL, "--check"])
    shown = capsys.readouterr()
    assert all(kind in shown.err for kind in KINDS) and "ok: yes" in shown.out
    run(["explain", saved, "--model", MODEL])
    assert KINDS[0] in capsys.readouterr().out


def test_the_graph_carries_it() -> None:
    from autopar.sharding.rules.discovered import replicate

    graph = replicate(load_model(MODEL, ModelOptions()).graph)
    assert graph.replicated == frozenset(KINDS)
    offers = analyse(graph, train=True).offers
    assert {option.name for option in offers["mixed"].options} == {"R", "B"}
