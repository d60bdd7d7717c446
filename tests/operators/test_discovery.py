"""Rules found by execution: in the notation, proven, told what is not proven, and used while
planning.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.cli import run
from autopar.errors import DiscoveryError, UnsupportedOperators, UsageError
from autopar.plan import Plan
from autopar.sharding.rules import RULES
from tests.operators.ranks import require_parity

from . import own_ops


def values(*shape: int) -> Tensor:
    """Floats of either sign, in single precision as a user has them."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(sum(shape))) * 2 - 1


FOUND: dict[
    str, tuple[Callable[[], autopar.operators.Discovery], str, tuple[tuple[int, ...], ...]]
] = {
    "equal by accident": (
        lambda: autopar.discover("aten.mm", values(4, 4), values(4, 4)),
        "a b, b c -> a c | b: sum",
        ((0,), (1,)),
    ),
    "equal by need": (
        lambda: autopar.discover("aten.hypot.default", values(4, 4), values(4, 4)),
        "a b, a b -> a b",
        (),
    ),
    "a broadcast dim of size 1": (
        lambda: autopar.discover("aten.add.Tensor", values(4, 1), values(4, 5)),
        "a b, a b -> a b",
        ((0, 1),),
    ),
    "an addend": (
        lambda: autopar.discover("aten.addmm.default", values(6), values(5, 7), values(7, 6)),
        "+a, b c, c a -> b a | c: sum",
        ((1,), (2,)),
    ),
    "a mean": (
        lambda: autopar.discover("aten.mean.dim", values(5, 4), dim=[0]),
        "a b -> b | a: mean",
        ((0,),),
    ),
    "a maximum": (
        lambda: autopar.discover("aten.amax.default", values(5, 4), dim=[0]),
        "a b -> b | a: max",
        (),
    ),
    "a dim counted from the back": (
        lambda: autopar.discover("aten.softmax.int", values(4, 4), dim=-1),
        "a !w0 -> a !w0",
        (),
    ),
    "linear where values are finite": (
        lambda: autopar.discover("aten.nan_to_num.default", values(5, 4)),
        "a b -> a b",
        (),
    ),
    "a whole dim": (
        lambda: autopar.discover("aten.softmax.int", values(5, 4, 3), dim=1),
        "a !w0 b -> a !w0 b",
        (),
    ),
    "an outer part that is never split": (
        lambda: autopar.discover("aten.glu.default", values(5, 6)),
        "a (2 b) -> a b",
        (),
    ),
    "parts within parts": (
        lambda: autopar.discover(
            "aten.pixel_shuffle.default", values(2, 12, 2, 2), upscale_factor=2
        ),
        "a !w0 b c -> a !w1 (b 2) (c 2)",
        ((0,),),
    ),
    "linear near zero only": (
        lambda: autopar.discover("aten.hardtanh.default", values(5, 4)),
        "a b -> a b",
        (),
    ),
    "a custom operator": (
        lambda: autopar.discover(own_ops.gated, *own_ops.gated_example()[1]),
        "a b c, c -> a b c",
        ((0,),),
    ),
    "package:function that returns a call": (
        lambda: autopar.discover("tests.operators.own_ops:gated_example"),
        "a b c, c -> a b c",
        ((0,),),
    ),
    "package:function beside its inputs": (
        lambda: autopar.discover("tests.operators.own_ops:outer_sum"),
        "a b, c -> b c | a: sum",
        ((0,), (1,)),
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, rule, linear = FOUND[name]
    for kind in [kind for kind in RULES if kind.startswith("aten.")]:
        monkeypatch.delitem(RULES, kind)
    before = dict(RULES)
    state = torch.get_rng_state()
    actual = call()
    assert (actual.entry.rule, actual.entry.linear) == (rule, linear)
    assert actual.strategies > 2 and not any("left out" in note for note in actual.notes)
    assert before == RULES and torch.equal(state, torch.get_rng_state())


def test_the_line_registers_what_was_found() -> None:
    discovered = autopar.discover(own_ops.mixed, values(4, 5), values(5, 6), values(6))
    exec(discovered.line, {"autopar": autopar})
    assert RULES["autopar_tests.mixed.default"] == discovered.entry
    assert discovered.entry.products == ("",) and discovered.entry.differentiable


def test_no_gradient_where_there_is_none() -> None:
    assert not autopar.discover("aten.sign.default", values(4, 6)).entry.differentiable
    assert not autopar.discover("aten.gt.Tensor", values(4, 6), values(6)).entry.differentiable


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "random": (
        lambda: autopar.discover(own_ops.noisy, values(4, 6)),
        DiscoveryError,
        "random numbers",
    ),
    "in place": (
        lambda: autopar.discover(own_ops.scaled_in_place, values(4, 6)),
        DiscoveryError,
        "in place",
    ),
    "a call that fails": (
        lambda: autopar.discover("aten.mm.default", values(4, 6), values(4, 6)),
        DiscoveryError,
        "example call fails",
    ),
    "no operator": (
        lambda: autopar.discover("aten.nosuch.default", values(4)),
        UsageError,
        "no operator 'aten.nosuch.default'",
    ),
    "too many arguments": (
        lambda: autopar.discover("aten.relu.default", values(4), values(4)),
        UsageError,
        "takes 1 arguments",
    ),
    "no module": (lambda: autopar.discover("no.such.module:op"), UsageError, "cannot be imported"),
    "a function without inputs": (
        lambda: autopar.discover("tests.operators.ranks:require_parity"),
        UsageError,
        "must return",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    call, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        call()


def test_rules_are_found_while_planning(tmp_path: Path) -> None:
    """The plan file carries them: it runs where nothing was found before."""
    pins = ("up/linear=rank:n", "gated=rank:b", "mixed=rank:b")
    plan = autopar.plan(
        *own_ops.build(), devices=2, cluster="local-cpu", discover=True, pins=pins, stages=1
    )
    assert {rule.kind.split(".")[1]: rule.rule for rule in plan.rules} == {
        "gated": "a b, b -> a b",
        "mixed": "a b, b c, +c -> a c | b: sum",
        "centred": "a !w0 -> a !w0",
    }
    plan.save(tmp_path / "plan.json")
    for rule in plan.rules:
        del RULES[rule.kind]
    require_parity(Plan.load(tmp_path / "plan.json"))


class Sliced(nn.Module):
    """An operator that a table without it does not know, with its sizes among its attributes, at
    the sizes of a real model.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width, device="meta"))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.glu(x @ self.weight).roll(1000, 0).mean()


def test_large_calls_are_executed_at_small_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("aten.glu.default", "aten.gelu.default"):
        monkeypatch.delitem(RULES, kind, raising=False)

    class Glu(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(8192, 8192, device="meta"))

        def forward(self, x: Tensor) -> Tensor:
            return torch.nn.functional.gelu(torch.nn.functional.glu(x @ self.weight)).mean()

    inputs = (torch.empty(4096, 8192, device="meta"),)
    plan = autopar.plan(Glu(), inputs, devices=2, cluster="local-cpu", discover=True, stages=1)
    assert {rule.rule for rule in plan.rules} == {"a (2 b) -> a b", "a b -> a b"}


def test_an_attribute_that_may_be_a_size_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An offset of 1000 would do nothing, or something else, in a small call."""
    monkeypatch.delitem(RULES, "aten.roll.default")
    inputs = (torch.empty(4096, 8192, device="meta"),)
    with pytest.raises(DiscoveryError, match=r"aten\.roll\.default.*may hold sizes"):
        autopar.plan(Sliced(8192), inputs, devices=2, cluster="local-cpu", discover=True)
    plan = autopar.plan(
        Sliced(8192), inputs, devices=2, cluster="local-cpu", discover=True, replicate_unknown=True
    )
    assert plan.replicated == ("aten.roll.default",)
    small = autopar.plan(
        Sliced(12),
        (torch.empty(24, 12, device="meta"),),
        devices=2,
        cluster="local-cpu",
        discover=True,
    )
    assert [rule.rule for rule in small.rules] == ["!w0 a -> !w0 a"]


def test_a_found_rule_is_for_the_calls_that_it_was_found_for() -> None:
    module, inputs = own_ops.build()
    autopar.plan(module, inputs, devices=2, cluster="local-cpu", discover=True)

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(6))

        def forward(self, x: Tensor) -> Tensor:
            scaled: Tensor = torch.ops.autopar_tests.gated(x, self.gate, 3.0)
            return scaled.mean()

    with pytest.raises(UnsupportedOperators, match="gated"):
        autopar.plan(Other(), (torch.zeros(4, 6),), devices=2, cluster="local-cpu")


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(["discover", "aten.linear.default", "--inputs", "4x6,5x6,5"])
    out = capsys.readouterr().out
    assert out.startswith(
        "autopar.register_rule('aten.linear.default', 'a b, c b, +c -> a c | b: sum', "
        "linear=((0,), (1,)), products=('',))"
    )
    run(["discover", "aten.embedding.default", "--inputs", "8x6,int64:5", "--json"])
    assert json.loads(capsys.readouterr().out)["rule"] == "a b, c -> c b | a: sum"
    run(["discover", "aten.log.default", "--inputs", "4x6", "--json"])
    assert json.loads(capsys.readouterr().out)["rule"] == "a b -> a b"
    run(["discover", "aten.cumsum.default", "--inputs", "4x6", "--set", "dim=1", "--json"])
    assert json.loads(capsys.readouterr().out)["rule"] == "a !w0 -> a !w0"
    saved = str(tmp_path / "plan.json")
    run(
        [
            "plan",
            "tests.operators.own_ops:build",
            "--cluster",
            "local-cpu",
            "--devices",
            "2",
            "--discover",
            "-o",
            saved,
        ]
    )
    assert "rule found by execution: autopar_tests.mixed.default" in capsys.readouterr().out
    for wrong in (["--inputs", "4xx"], ["--inputs", "nosuch:4"], ["--set", "dim=zwei"]):
        with pytest.raises(UsageError):
            run(["discover", "aten.softmax.int", *wrong])
