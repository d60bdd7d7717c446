"""The share of each collective that runs under computation: by hand on a few events, and together
that of the whole step.
"""

from __future__ import annotations

from typing import Any

import pytest
from report_models import account, planned

from autopar.analysis.program.hiding import Hidden, hidden_of
from autopar.costmodel.step.streams import COMPUTE, Event
from autopar.plan_origin import cluster_of_plan
from autopar.report.explain.collectives import collectives_json, collectives_parts
from autopar.report.page.traffic import communication
from autopar.report.tables import Table
from autopar.sharding.mesh import Mesh
from autopar.sharding.program import Collective

ONE = Mesh.of(gpu=2)
EVENTS = [
    Event("a", "matmul", COMPUTE, "forward", 0.0, 2.0),
    Event("b", "matmul", COMPUTE, "forward", 3.0, 5.0),
    Event("x", "all_reduce", "gpu", "forward", 1.0, 4.0),
    Event("y", "all_reduce", "gpu", "forward", 5.0, 6.0),
    Event("z", "all_gather", "gpu", "backward", 3.0, 4.0),
]
ROWS = [
    (("x",), "all_reduce", 2 / 3),
    (("y",), "all_reduce", 0.0),
    (("x", "y"), "all_reduce", 1 / 2),
    (("q",), "all_reduce", None),
]


def _collective(tensor: str, kind: str, phase: Any = "forward") -> Collective:
    return Collective(kind=kind, axes=(0,), nbytes=4, phase=phase, tensor=tensor)


@pytest.mark.parametrize(("tensors", "kind", "share"), ROWS)
def test_shares_by_hand(tensors: tuple[str, ...], kind: str, share: float | None) -> None:
    actual = Hidden(EVENTS).share([_collective(tensor, kind) for tensor in tensors], ONE.name)
    assert actual == (share if share is None else pytest.approx(share))


def test_phases_are_told_apart() -> None:
    assert Hidden(EVENTS).share([_collective("z", "all_gather", "backward")], ONE.name) == 1.0
    assert Hidden(EVENTS).share([_collective("z", "all_gather")], ONE.name) is None


@pytest.mark.parametrize(
    "asked", [{"scheme": "zero3"}, {"scheme": "data"}, {"scheme": "megatron", "zero": 0}]
)
def test_the_whole_is_about_that_of_the_step(asked: dict[str, Any]) -> None:
    """But for what computation is slowed while anything is sent, which counts as not hidden."""
    planned_model = planned(stages=1, micro_batches=1, recompute="none", **asked)
    whole = account(planned_model)
    hidden = hidden_of(
        planned_model.plan, whole.analysis, cluster_of_plan(planned_model.plan, None)
    )
    told = collectives_json(planned_model.plan, whole, hidden)
    pairs = [
        pair for row in told["operators"] for pair in zip(row["totals"], row["hidden"], strict=True)
    ]
    assert pairs and all(share is not None and 0 <= share <= 1 for _, share in pairs)
    summed = sum(one["seconds"] * share for one, share in pairs)
    assert told["hidden"] - 1e-9 <= summed <= told["hidden"] + 0.13 * told["communication"]
    table = collectives_parts(planned_model.plan, whole, hidden)[-1]
    assert (
        isinstance(table, Table)
        and table.columns[-1] == ">hidden"
        and all(row[-1].endswith("%") for row in table.rows)
    )


def test_of_stages_it_is_not_known() -> None:
    planned_model = planned(scheme="data", stages=2, micro_batches=4, mesh=(2,))
    whole = account(planned_model)
    assert (
        hidden_of(planned_model.plan, whole.analysis, cluster_of_plan(planned_model.plan, None))
        is None
    )
    table = collectives_parts(planned_model.plan, whole, None)[-1]
    assert isinstance(table, Table) and table.columns[-1] == ">seconds"


def test_the_report_tells_it_by_axis() -> None:
    planned_model = planned(scheme="zero3", stages=1, micro_batches=1)
    whole = account(planned_model)
    cluster = cluster_of_plan(planned_model.plan, None)
    table = communication(planned_model.plan, whole, cluster).tables[0]
    assert table.columns[-1] == ">hidden" and all(row[-1].endswith("%") for row in table.rows)
    assert communication(planned_model.plan, None, cluster).tables[0].columns[-1] == ">seconds"
