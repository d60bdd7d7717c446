"""The runner of scripts notices what goes wrong on any rank, and goes on with the next script."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from autopar.errors import PlanError
from tests.end_to_end.scripts import running
from tests.end_to_end.scripts.comparing import wrong
from tests.end_to_end.scripts.running import Outcome
from tests.end_to_end.scripts.steps import rank
from tests.end_to_end.scripts.table import Expected, Make, Script, Values

HALF = Outcome(values={"loss": 0.5, "weight a": torch.ones(2)})
REFUSED = Outcome(error="PlanError: no", known=True)


def _fine(make: Make) -> Values:
    return {"loss": 1.0}


def _raises(make: Make) -> Values:
    raise ZeroDivisionError("as it happens")


def _ends(make: Make) -> Values:
    if rank():
        os._exit(3)
    return {"loss": 1.0}


def _refuses(make: Make) -> Values:
    raise PlanError("the same on all ranks")


def _module(*_: object, **__: object) -> nn.Module:
    return nn.Identity()


def test_a_script_that_breaks_the_ranks_does_not_break_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An error that is not autopar's, a rank that ends, and errors that are autopar's, with
    ordinary scripts between them.
    """
    monkeypatch.setattr(running, "PATIENCE", 1.0)
    runs = {
        "first": _fine,
        "raises": _raises,
        "second": _fine,
        "ends": _ends,
        "refuses": _refuses,
        "third": _fine,
    }
    actual = running.run_each(
        [Script(name=name, family="none", run=run) for name, run in runs.items()], _module, 2
    )
    assert list(actual) == list(runs)
    for name in ("first", "second", "third"):
        assert [outcome.values for outcome in actual[name]] == [{"loss": 1.0}] * 2
    assert any("as it happens" in outcome.error for outcome in actual["raises"]) and not any(
        o.known for o in actual["raises"]
    )
    assert actual["ends"][1].error == "no end" and "exit code 3" in actual["ends"][1].trace
    assert [(o.known, o.error) for o in actual["refuses"]] == [
        (True, "PlanError: the same on all ranks")
    ] * 2


@pytest.mark.parametrize(
    ("expected", "ranks", "told"),
    [
        ("equal", (HALF, HALF), ""),
        ("either", (HALF, HALF), ""),
        ("refused", (HALF, HALF), "not refused"),
        ("refused", (REFUSED, REFUSED), ""),
        ("either", (REFUSED, REFUSED), ""),
        ("equal", (REFUSED, REFUSED), "refused: PlanError: no"),
        ("either", (REFUSED, HALF), "the ranks do not agree"),
        (
            "refused",
            (REFUSED, Outcome(error="PlanError: yes", known=True)),
            "the ranks do not agree",
        ),
        ("either", (REFUSED, Outcome(error="no end", trace="killed")), "rank 1: no end"),
        ("equal", (HALF, Outcome(values={"loss": 0.5})), ""),  # a weight may lie on one rank only,
        (
            "equal",
            (Outcome(values={"loss": 0.5}),) * 2,
            "no rank has 'weight a'",
        ),  # but not on none,
        (
            "equal",
            (HALF, Outcome(values={"weight a": torch.ones(2)})),
            "rank 1 lacks 'loss'",
        ),  # and a loss is on all
        ("equal", (HALF, Outcome(values={"loss": 0.5, "other": 1.0})), "rank 1 has also 'other'"),
        ("equal", (HALF, Outcome(values={"loss": 0.5 + 1e-8})), "rank 1: loss: 0.50000001 for 0.5"),
        ("equal", (HALF, Outcome(values={"loss": float("nan")})), "rank 1: loss: nan for 0.5"),
        (
            "equal",
            (HALF, Outcome(values={"loss": 0.5, "weight a": torch.ones(3)})),
            "shape [3] for [2]",
        ),
        (
            "equal",
            (HALF, Outcome(values={"loss": 0.5, "weight a": torch.tensor([1.0, 1.001])})),
            "off by 0.001 of the largest",
        ),
    ],
)
def test_what_is_wrong(expected: Expected, ranks: Sequence[Outcome], told: str) -> None:
    """Against one device, where the loss is 0.5 and the weight is ones."""
    actual = wrong(Script(name="a", family="none", run=_fine), expected, ranks, (HALF,))
    assert told in actual and bool(told) == bool(actual)
