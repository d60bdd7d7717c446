"""A user's rule: registered in one call, refused where it is wrong, planned and run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import autopar
from autopar.cli import run
from autopar.errors import RuleError, UsageError
from autopar.operators import kinds_of
from autopar.plan import Plan
from autopar.sharding.rules import RULES, Call
from tests.operators.own_ops import build, centred, gated, mixed
from tests.operators.ranks import require_parity

GATED, MIXED, CENTRED = (f"autopar_tests.{name}.default" for name in ("gated", "mixed", "centred"))


def values(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) - 0.5


def register_all() -> None:
    """The rules of the module's three operators, in three ways."""
    samples = [
        (values(6, 12), values(12), 0.5),
        {"x": values(12, 6, 12), "gate": values(12), "scale": -2.0},
    ]
    autopar.register_rule(gated, "* h, h -> * h", linear=((0,),), samples=samples)
    product = [(values(12, 6), values(6, 12), values(12))]
    autopar.register_rule(
        "autopar_tests::mixed",
        "m k, k n, +n -> m n | k: sum",
        linear=((0,), (1,)),
        products=("",),
        samples=product,
    )
    assert (
        autopar.register_rule("* !h -> * !h", linear=((0,),), samples=[(values(6, 6),)])(centred)
        is centred
    )


PINS = {
    "row-parallel behind column-parallel": ("up/linear=rank:n", "gated=rank:h", "mixed=rank:k"),
    "data parallel": ("up/linear=rank:d0", "gated=rank:d0", "mixed=rank:m", "centred=rank:d0"),
    "a partial sum passes": ("up/linear=rank:k", "gated=rank:P"),
}


@pytest.mark.parametrize("name", PINS)
def test_own_operators_are_planned_and_run(name: str) -> None:
    register_all()
    module, inputs = build()
    plan = autopar.plan(module, inputs, devices=2, cluster="local-cpu", pins=PINS[name], stages=1)
    assert {op: plan.operators[op].strategy for op in ("gated",)}["gated"] != ("R",)
    require_parity(plan)


def test_names_of_operators() -> None:
    assert kinds_of("a.b.c onnx.Foo") == ("a.b.c", "onnx.Foo")
    assert kinds_of("mylib::op mylib::op.out") == ("mylib.op.default", "mylib.op.out")
    assert kinds_of([mixed, torch.ops.autopar_tests.centred]) == (MIXED, CENTRED)
    assert kinds_of(torch.ops.aten.linear.default) == ("aten.linear.default",)
    assert set(kinds_of(torch.ops.aten.fmod)) >= {"aten.fmod.Tensor", "aten.fmod.Scalar"}
    for wrong in ("gated", "-> x", 3):
        with pytest.raises(RuleError):
            kinds_of(wrong)


def test_a_function_may_write_the_rule() -> None:
    @autopar.register_rule(f"{GATED} {CENTRED}")
    def rule(call: Call) -> str:
        return "* !h" + ", !h" * (len(call.inputs) - 1) + " -> * !h"

    assert RULES[GATED].rule is RULES[CENTRED].rule is rule


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "registered twice": (
        lambda: autopar.register_rule("aten.linear.default", "* -> *"),
        "already has",
    ),
    "no arrow": (lambda: autopar.register_rule(GATED, "a b, b"), "no '->'"),
    "an unreadable name": (lambda: autopar.register_rule(GATED, "a b, b -> a ?"), "cannot read"),
    "no text": (lambda: autopar.register_rule(GATED, 3), "a text or a function"),  # type: ignore[arg-type]
    "a clause of no factor": (
        lambda: autopar.register_rule(MIXED, "m k, k n, +n -> m n | j: sum"),
        "unknown factor 'j'",
    ),
    "linear in no input": (
        lambda: autopar.register_rule(GATED, "* h, h -> * h", linear=((2,),)),
        "has 2 inputs",
    ),
    "saves": (
        lambda: autopar.register_rule(GATED, "* h, h -> * h", saves="all"),
        "'inputs', 'output', ''",
    ),
    "not what it computes": (
        lambda: autopar.register_rule(CENTRED, "a b -> a b", samples=[(values(6, 6),)]),
        "is not what it computes",
    ),
    "not linear": (
        lambda: autopar.register_rule(
            GATED, "a b, b -> a b", linear=((1,),), samples=[(values(6, 6), values(6), 1.0)]
        ),
        "is not what it computes",
    ),
    "of another rank": (
        lambda: autopar.register_rule(
            GATED, "a b, b -> a b", samples=[(values(6, 6, 6), values(6), 1.0)]
        ),
        "does not match one of rank 3",
    ),
    "samples that cannot be split": (
        lambda: autopar.register_rule(
            GATED, "a b, b -> a b", samples=[(values(6, 7), values(7), 1.0)]
        ),
        "a split of b untried",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name: str) -> None:
    call, message = WRONG[name]
    before = dict(RULES)
    with pytest.raises(RuleError, match=message):
        call()
    assert before == RULES


def test_nothing_is_registered_where_one_of_several_is_refused() -> None:
    with pytest.raises(RuleError):
        autopar.register_rule(["mylib.fresh.default", "aten.linear.default"], "* -> *")
    assert "mylib.fresh.default" not in RULES


MODULE = """
import autopar

print("noise on stdout")
autopar.register_rule("autopar_tests.gated.default", "* h, h -> * h", linear=((0,),))
autopar.register_rule("autopar_tests.mixed.default", "m k, k n, +n -> m n | k: sum", products=("",))
autopar.register_rule("autopar_tests.centred.default", "* !h -> * !h")
"""


def test_rules_of_a_module_named_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own_rules.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_rules", raising=False)
    saved = str(tmp_path / "plan.json")
    model = "tests.operators.own_ops:build"
    run(
        [
            "plan",
            model,
            "--cluster",
            "local-cpu",
            "--devices",
            "2",
            "--rules",
            "own_rules",
            "--pin",
            "mixed=rank:k",
            "--quiet",
            "-o",
            saved,
        ]
    )
    plan = Plan.load(saved)
    assert plan.operators["mixed"].strategy == ("k",) and not plan.rules and not plan.replicated
    run(["run", saved, "--model", model, "--rules", "own_rules", "--check", "--json"])
    run(["explain", saved, "mixed", "--model", model, "--rules", "own_rules", "--json"])
    assert "noise" not in capsys.readouterr().out
    with pytest.raises(UsageError, match="no_such_rules"):
        run(["plan", model, "--rules", "no_such_rules"])
