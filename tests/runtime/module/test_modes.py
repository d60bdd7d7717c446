"""Which program a module runs in training and in evaluation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from autopar.errors import PlanError
from autopar.runtime.module import modes
from autopar.runtime.module.modes import Modes


@pytest.mark.parametrize(
    ("planned", "training", "evaluation", "only", "outcome"),
    [
        (True, True, True, "", "main"),
        (True, False, True, "", "made"),
        (True, False, False, "", "main"),
        (False, False, True, "", "main"),
        (False, True, True, "", "main"),
        (False, True, True, "the plan is for inference", "refused"),
        (False, False, True, "the plan is for inference", "main"),
    ],
)
def test_the_engine_of_a_mode(
    monkeypatch: pytest.MonkeyPatch,
    planned: bool,
    training: bool,
    evaluation: bool,
    only: str,
    outcome: str,
) -> None:
    engines: list[object] = []

    def engine(*given: object, exact: bool) -> object:
        engines.append(SimpleNamespace(given=given))
        return engines[-1]

    monkeypatch.setattr(modes, "Engine", engine)
    main = cast(Any, SimpleNamespace(world=1, device=2, stored=3, exact=False))
    remaking = SimpleNamespace(execution=lambda **asked: "as evaluated", exports=False)
    given = Modes(main, cast(Any, remaking) if evaluation else None)
    given.planned = planned
    given.only = only
    of_both = given, given.on(main)
    for each in of_both:
        if outcome == "refused":
            with pytest.raises(PlanError, match=only):
                each.engine(training=training)
        elif outcome == "main":
            assert each.engine(training=training) is main
        else:
            made = cast(Any, each.engine(training=training))
            assert made.given == ("as evaluated", 1, 2, 3)
            assert each.engine(training=training) is each.engine(training=training), "made once"
    assert len(engines) == (len(of_both) if outcome == "made" else 0)
