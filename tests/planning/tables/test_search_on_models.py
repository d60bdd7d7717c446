"""The searches on real models' tables: exact where it can be checked, and priced as executed."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from autopar.costmodel import bind_axes
from autopar.costmodel.step.estimate import estimate, timeline
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.frontends.load import LoadedModel
from autopar.options.plan_options import choose_cluster
from autopar.order.scheduled import scheduled
from autopar.planning.model import Request
from autopar.planning.model.pins import Pins
from autopar.planning.space import Multiplicities
from autopar.planning.space.candidates import name_axes
from autopar.planning.tables.build import build_tables
from autopar.planning.tables.decoding import decode
from autopar.planning.tables.requested import requested_tables
from autopar.planning.tables.tables import Tables
from autopar.search import solve
from autopar.sharding.analysis import analyse
from autopar.sharding.program_builder import build_program
from tests.planning.modules import loaded, perceptron, transformer


def tables_of(
    model: LoadedModel, sizes: tuple[int, ...], *, train: bool = True, pins: Pins | None = None
) -> Tables:
    """The priced tables of a model on a mesh."""
    chosen = choose_cluster("dgx-h100", math.prod(sizes))[0]
    levels = bind_axes(chosen, sizes)
    assert levels is not None
    mesh = name_axes(chosen, sizes, levels)
    analysis = analyse(model.graph, train=train)
    limits = pins(analysis, mesh) if pins else None
    return build_tables(
        analysis,
        MeshPrices(cluster=chosen, mesh=mesh),
        optimizer="adamw" if train else "none",
        limits=limits,
    )


RELU = Pins(operators={"1/relu": {"gpu0": "d0", "gpu1": "d1"}})
CASES = {
    "training on 2": ((2,), True, None),
    "inference on 4": ((4,), False, None),
    "inference on 2 x 2": ((2, 2), False, RELU),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rows", [16, 4096])
def test_the_searches_agree_with_looking_at_everything(name: str, rows: int) -> None:
    sizes, train, pins = CASES[name]
    tables = tables_of(
        loaded(perceptron(64, 256, 64), rows, 64, train=train), sizes, train=train, pins=pins
    )
    assert math.prod(tables.graph.sizes) <= 10**8
    truth = solve(tables.graph, method="exhaustive")
    exact = solve(tables.graph, method="dynamic_programming")
    fast = solve(tables.graph, method="recursive_programming")
    assert exact.cost == pytest.approx(truth.cost, rel=1e-9) and exact.gap < 1e-9
    assert fast.cost >= truth.cost * (1 - 1e-9) and fast.lower_bound <= truth.cost * (1 + 1e-9)


@pytest.mark.parametrize("sizes", [(8,), (2, 4), (2, 2, 2)])
def test_recursive_programming_is_never_better(sizes: tuple[int, ...]) -> None:
    graph = tables_of(loaded(transformer(2, 64, 8), 8, 16, 64), sizes).graph
    exact, fast = (
        solve(graph, method=method) for method in ("dynamic_programming", "recursive_programming")
    )
    assert exact.lower_bound <= exact.cost <= fast.cost * (1 + 1e-9)
    assert exact.gap < 1e-9 and fast.cost <= 1.02 * exact.cost


def test_on_four_axes_the_near_linear_search_prices_three_runs_at_most() -> None:
    model = loaded(perceptron(64, 256, 64), 4096, 64, train=True)
    cluster = choose_cluster("dgx-h100", 16)[0]
    levels = bind_axes(cluster, (2, 2, 2, 2))
    assert levels is not None
    mesh = name_axes(cluster, (2, 2, 2, 2), levels)
    analysis = analyse(model.graph, train=True)
    prices = MeshPrices(cluster=cluster, mesh=mesh)
    every, few = (
        requested_tables(
            Request(cluster=cluster, search=method), analysis, prices, Multiplicities(), whole=True
        ).graph
        for method in ("dynamic_programming", "recursive_programming")
    )
    assert every.digits is not None and few.digits is not None
    for digits, others in zip(few.digits, every.digits, strict=True):
        assert ((digits[:, 1:] != digits[:, :-1]).sum(axis=1) <= 2).all()
        assert len(digits) <= len(others)
    assert sum(few.sizes) < sum(every.sizes)
    assert solve(few).cost <= 1.02 * solve(every).cost


def _random_choices(tables: Tables, rng: random.Random) -> tuple[int, ...]:
    """Any assignment of finite cost: variables in order, each among the choices that no edge
    forbids.
    """
    graph = tables.graph
    choices: list[int] = []
    for v, unary in enumerate(graph.unary):
        allowed = np.isfinite(unary)
        for u in range(v):
            if (u, v) in graph.edges:
                allowed &= np.isfinite(graph.edges[u, v][choices[u]])
        choices.append(rng.choice(np.flatnonzero(allowed).tolist()))
    return tuple(choices)


@pytest.mark.parametrize(("sizes", "train"), [((4,), True), ((2, 2), True), ((2, 4), False)])
def test_what_is_executed_costs_no_more_than_the_tables_say(
    sizes: tuple[int, ...], train: bool
) -> None:
    """Any choice of strategies: compute, update and every collective of its program, against the
    cost graph's sum.

    A program may cost less (a layout that exists is not made again). It may cost more by the
    latencies of its units, of which the tables count only a share, and by the copies into their
    messages and out of them.
    """
    tables = tables_of(loaded(transformer(1, 64, 8), 8, 16, 64, train=train), sizes, train=train)
    rng = random.Random(5)
    cheaper = 0
    for _ in range(30):
        choices = _random_choices(tables, rng)
        program = build_program(tables.analysis.graph, decode(tables, choices))
        actual = timeline(program, tables.analysis, tables.prices, optimizer=tables.optimizer)
        seconds = actual.step
        wanted = tables.graph.cost(choices)
        figures = estimate(program, tables.analysis, tables.prices, optimizer=tables.optimizer)
        assert seconds == pytest.approx(figures.step, rel=1e-12)
        parameters = {t.name for t in program.graph.parameters}
        prices = tables.prices
        moved = [c for c in scheduled(program).collectives() if c.tensor in parameters]
        paid = [
            (
                prices.seconds(c.kind, c.axes, c.nbytes),
                prices.unit_seconds(c.kind, c.axes, c.nbytes),
            )
            for c in moved
        ]
        copies = sum(e.end - e.start for e in actual.events if e.kind in ("flatten", "unflatten"))
        slack = sum(max(0.0, alone - share) for alone, share in paid)
        # A parameter's chain is that of fewest seconds by its bytes, a trifle more than the tables'
        # for what is tiny.
        assert seconds <= (wanted + slack + copies) * (1 + 1e-3), f"{choices}"
        cheaper += seconds < wanted - 1e-6
    assert cheaper < 30
