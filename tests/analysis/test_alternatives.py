"""Forced strategies are solved again: their prices are those of pinned plans, and their parts add
up.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from report_models import MEGATRON, planned

from autopar.analysis.searches import alternatives as why
from autopar.analysis.searches.alternatives import Why
from autopar.analysis.searches.outer_choices import outer_alternatives
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError
from autopar.planning.model.counts import Counts
from autopar.planning.model.pins import Pins
from autopar.planning.model.progress import Progress
from autopar.planning.space.multiplicities import Multiplicities
from autopar.planning.tables.build import build_tables
from autopar.planning.tables.parameters.first_read import early_on
from autopar.planning.tables.parameters.traffic import hideable
from autopar.report.explain.answers import alternatives_table, pinned_table
from autopar.report.explain.explanation import Explained
from autopar.report.explain.further_answers import Further, answered
from autopar.search import solve
from autopar.sharding.analysis import analyse

UP = "/layers.0/up/MatMul"


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_the_price_is_that_of_the_pinned_problem(mesh: tuple[int, ...]) -> None:
    """Against tables that are built anew with the operator pinned."""
    planned_model = planned(mesh=mesh)
    analysis = analyse(planned_model.model.graph, train=True)
    asked = Why(planned_model.plan, analysis, planned_model.cluster)
    told = asked.alternatives(UP)
    prices = MeshPrices(
        cluster=planned_model.cluster,
        mesh=planned_model.plan.mesh_,
        unit_bytes=planned_model.plan.schedule.unit_bytes,
    )
    early = early_on(planned_model.plan.mesh_, analysis, planned_model.cluster, Counts()).readers
    work = Multiplicities(early=early)
    parameters = sum(parameter.bytes for parameter in analysis.graph.parameters)
    work = replace(work, hidden=hideable(prices, parameters, work, analysis.graph.tensors))
    assert len(told) == len(asked.tables.strategies[UP].choices) > 4 ** len(mesh)
    for other in told:
        limits = Pins(operators={UP: other.strategy})(analysis, planned_model.plan.mesh_)
        pinned = solve(
            build_tables(analysis, prices, optimizer="adamw", limits=limits, work=work).graph
        )
        assert other.objective == pytest.approx(pinned.cost, rel=1e-9)
    best = solve(build_tables(analysis, prices, optimizer="adamw", work=work).graph).cost
    assert asked.objective == pytest.approx(best) and min(
        other.change or 0.0 for other in told
    ) == pytest.approx(0.0, abs=1e-9 * best)
    assert [other.step for other in told] == sorted(other.step or 0.0 for other in told)
    assert [other.step for other in told if other.planned] == [planned_model.plan.predicted.step]


def test_the_parts_of_a_price_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "TOLD", 10_000)
    monkeypatch.setattr(why, "NEGLIGIBLE", 0.0)
    planned_model = planned(mesh=(2, 2))
    asked = Why(
        planned_model.plan, analyse(planned_model.model.graph, train=True), planned_model.cluster
    )
    for other in asked.alternatives(UP):
        assert other.change is not None
        parts = [other.own, other.others, *(move.seconds for move in other.moves)]
        assert math.fsum(parts) == pytest.approx(
            other.change, rel=1e-6, abs=1e-12 * asked.objective
        )


def test_a_parameter_says_why_it_is_stored_so() -> None:
    """Every layout is forced; the planned one has the plan's own step, whatever the tables say."""
    planned_model = planned(mesh=(4,))
    name = "layers.0.up.weight"
    told = Explained.of_model(
        planned_model.plan, planned_model.model.graph, planned_model.cluster, name
    )
    assert {other.strategy["gpu"] for other in told.storages} == {
        "R",
        "S0",
        "S1",
    } and told.parameter == name
    assert [other.step for other in told.storages if other.planned] == [
        planned_model.plan.predicted.step
    ]
    lines = [part for part in told.parts() if isinstance(part, str)]
    assert (
        lines[0].startswith(name)
        and f"stored as {planned_model.plan.parameters[name].storage}" in lines[1]
        and "why:" in lines[-1]
    )
    assert told.json()["parameter"] == name and len(told.json()["storages"]) == 3
    assert Explained.of_file(planned_model.plan, name).parts()[1] == lines[1]


def test_the_redistributions_that_differ_are_told() -> None:
    planned_model = planned(pins=MEGATRON)
    asked = Why(
        planned_model.plan, analyse(planned_model.model.graph, train=True), planned_model.cluster
    )
    told = {other.strategy["gpu"]: other for other in asked.alternatives(UP)}
    assert told["n"].words == {"gpu": "column-parallel"} and told["k"].words == {
        "gpu": "row-parallel"
    }
    assert [other.strategy for other in told.values() if other.planned] == [{"gpu": "n"}]
    assert any(move.tensor == "/layers.0/up/MatMul_output_0" for move in told["k"].moves)
    assert all(
        move.best_seconds != move.forced_seconds for other in told.values() for move in other.moves
    )


def test_a_memory_limit_holds_for_what_is_forced() -> None:
    free = planned()
    analysis = analyse(free.model.graph, train=True)
    least = planned(memory=free.plan.predicted.memory * 0.5)
    steps = [
        Why(least.plan, analysis, least.cluster, memory=limit).objective
        for limit in (free.plan.predicted.memory * 0.5, None)
    ]
    assert steps[0] > steps[1]


def test_of_many_strategies_those_one_axis_away_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(why, "ALL", 3)
    planned_model = planned(mesh=(2, 2))
    planned_as = planned_model.plan.operators[UP].strategy
    told = Why(
        planned_model.plan, analyse(planned_model.model.graph, train=True), planned_model.cluster
    ).alternatives(UP)
    away = [
        sum(a != b for a, b in zip(other.strategy.values(), planned_as, strict=True))
        for other in told
    ]
    assert set(away) == {0, 1} and away.count(0) == 1


def _quiet() -> Progress:
    return lambda done, of, what: None


def test_explained_holds_the_answers() -> None:
    planned_model = planned()
    whole = Explained.of_model(
        planned_model.plan, planned_model.model.graph, planned_model.cluster, UP
    )
    told = answered(whole, planned_model.cluster, Further(alternatives=True), _quiet())
    assert told.json()["best"] == told.step and len(told.json()["alternatives"]) == len(told.others)
    table = alternatives_table(told.others, ["gpu"], told.step)
    assert table in told.parts() and any("as planned" in row[1] for row in table.rows)
    several = Explained.of_model(
        planned_model.plan, planned_model.model.graph, planned_model.cluster, "*/up/*"
    )
    with pytest.raises(UsageError, match="names 2"):
        answered(several, planned_model.cluster, Further(alternatives=True), _quiet())


@pytest.mark.slow
@pytest.mark.ci
def test_outer_variables_are_pinned_one_by_one() -> None:
    """In a model in which computing counts, pipelines that are not filled, which only pins reach,
    are no faster.
    """
    planned_model = planned(4, 1024, mesh=None)
    analysis = analyse(planned_model.model.graph, train=True)
    told = outer_alternatives(planned_model.plan, analysis, planned_model.cluster)
    tried = {(other.variable, other.value) for other in told}
    assert {
        ("stages", "1"),
        ("micro-batches", "2"),
        ("recompute", "none"),
        ("recompute", "full"),
        ("ZeRO", "0"),
        ("ZeRO", "3"),
    } <= tried
    best = planned_model.plan.predicted.step
    assert min(other.step for other in told if other.step is not None) >= best * (1 - 1e-9)
    for other in told:
        if other.variable == "ZeRO" and other.step is not None:
            assert (
                other.step == planned(4, 1024, mesh=None, zero=int(other.value)).plan.predicted.step
            )
    assert len(pinned_table(told, planned_model.plan).rows) == len(told)
