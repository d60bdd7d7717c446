"""The collectives of a plan as tables and as one object: none is lost or counted twice, from the
file or with the model.
"""

from __future__ import annotations

from typing import Any

import pytest
from report_models import MEGATRON, account, planned

from autopar.report.explain.collectives import PARAMETERS, collectives_json, collectives_parts
from autopar.report.tables import Table

PLANS: dict[str, dict[str, Any]] = {
    "megatron": {"pins": MEGATRON, "stages": 1, "micro_batches": 1, "zero": 0},
    "data": {"scheme": "data", "stages": 1},
    "zero3": {"scheme": "zero3", "stages": 1, "micro_batches": 2},
    "two axes": {"scheme": "2d", "mesh": (2, 2), "stages": 1},
    "stages": {"scheme": "data", "stages": 2, "micro_batches": 4, "mesh": (2,)},
    "stages alone": {"devices": 2, "stages": 2, "micro_batches": 4, "mesh": (1,)},
    "one device": {"devices": 1, "mesh": (1,)},
}


@pytest.mark.parametrize("name", PLANS)
def test_every_collective_is_counted_once(name: str) -> None:
    planned_model = planned(**PLANS[name])
    whole = account(planned_model)
    plan = planned_model.plan
    bare = collectives_json(plan, None)
    told = collectives_json(plan, whole)
    assert bare["of"] == ("micro-batch" if plan.stages else "step") and told["of"] == "step"
    assert "operators" not in bare
    assert sum(row["times"] for row in bare["totals"]) == len(plan.collectives)
    assert sum(row["seconds"] for row in told["totals"]) == pytest.approx(whole.communication)
    if not plan.stages:
        assert sum(row["seconds"] for row in bare["totals"]) == pytest.approx(
            plan.predicted.communication
        )
    by_operator = [one for issuer in told["operators"] for one in issuer["totals"]]
    for figure in ("times", "nbytes", "seconds"):
        assert sum(one[figure] for one in by_operator) == pytest.approx(
            sum(row[figure] for row in told["totals"])
        )
    assert (told["communication"], told["hidden"]) == (
        plan.predicted.communication,
        plan.predicted.overlapped,
    )


def test_levels_are_those_of_the_axes() -> None:
    plan = planned(**PLANS["two axes"]).plan
    levels = {axis.name: axis.level for axis in plan.mesh}
    rows = collectives_json(plan, None)["totals"]
    assert rows and all(
        row["level"] == " x ".join(dict.fromkeys(levels[name] for name in row["axis"].split(" x ")))
        for row in rows
    )


def test_parameters_stand_last_and_layers_are_folded() -> None:
    planned_model = planned(layers=3, **PLANS["zero3"])
    *_, table = collectives_parts(planned_model.plan, account(planned_model))
    assert isinstance(table, Table)
    names = [row[0] for row in table.rows if row[0]]
    assert names[-1] == PARAMETERS and not any("layers.1" in name for name in names)


SENTENCES = {
    "one device": "Nothing is communicated.",
    "stages alone": "within a stage",
    "stages": "beside",
    "data": "hidden under",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences(name: str) -> None:
    parts = collectives_parts(planned(**PLANS[name]).plan, None)
    assert any(isinstance(part, str) and SENTENCES[name] in part for part in parts)
