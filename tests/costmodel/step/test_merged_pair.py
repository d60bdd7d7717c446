"""The seconds that a pair of merged passes hides are those by which a merged step is shorter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from autopar.costmodel.step.estimate import estimate
from autopar.costmodel.step.merged_pair import hidden_by_layer
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.frontends.load import ModelOptions, load_model
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from autopar.sharding.analysis import analyse
from autopar.sharding.micro_batches import split_batch
from autopar.sharding.program import Redistribute, only_casts
from autopar.sharding.schedule import Types
from tests.end_to_end.plans import request
from tests.order.test_beside import LAYERS, Net

pytestmark = [pytest.mark.slow, pytest.mark.ci]
COUNT = 4


def test_a_step_is_shorter_by_what_hides_in_its_pairs() -> None:
    graph = load_model(Net("none"), ModelOptions(train=True), (torch.randn(64, 64, 16),)).graph
    wanted = request((2,), train=True, optimizer="sgd")
    assert wanted.mesh is not None
    axes = {axis.name: "e+t" for axis in wanted.mesh.axes}
    pins = Pins(operators={op.name: axes for op in graph.operators if op.kind == "autopar.experts"})
    plan = search_plan(graph, replace(wanted, limits=pins, zero=0, micro_batches=COUNT))
    analysis = analyse(graph, train=True)
    part = split_batch(analysis, COUNT)
    prices = MeshPrices(cluster=wanted.cluster, mesh=wanted.mesh)
    steps = []
    for merged in (False, True):
        schedule = plan.schedule.model_copy(update={"overlap_experts": merged})
        micro = plan.model_copy(update={"schedule": schedule}).execution(analysis).micro
        steps.append(estimate(micro, part, prices, optimizer="sgd").step)
    hidden = hidden_by_layer(micro.program, part, prices, micro.schedule)
    assert len(hidden) == LAYERS and min(hidden.values()) > 0
    # Each backward pass but the last has a forward pass beside it.
    assert steps[0] - steps[1] == pytest.approx((COUNT - 1) * sum(hidden.values()), rel=0.1)


def test_layers_are_named_where_parameters_are_cast() -> None:
    graph = load_model(Net("none"), ModelOptions(train=True), (torch.randn(64, 64, 16),)).graph
    wanted = request((2,), train=True, optimizer="sgd")
    assert wanted.mesh is not None
    layers = [op.name for op in graph.operators if op.kind == "autopar.experts"]
    axes = {axis.name: "e+t" for axis in wanted.mesh.axes}
    pins = Pins(operators=dict.fromkeys(layers, axes))
    types = Types(master="float64")
    wanted = replace(wanted, limits=pins, zero=0, micro_batches=COUNT, types=types)
    plan = search_plan(graph, wanted)
    part = split_batch(analyse(graph, train=True), COUNT)
    micro = plan.execution(analyse(graph, train=True)).micro
    prices = MeshPrices(cluster=wanted.cluster, mesh=wanted.mesh)
    steps = micro.program.steps
    moving = [s for s in steps if not isinstance(s, Redistribute) or not only_casts(s)]
    assert len(moving) < len(steps)
    for program in (micro.program, replace(micro.program, steps=tuple(moving))):
        assert set(hidden_by_layer(program, part, prices, micro.schedule)) == set(layers)


def test_nothing_hides_without_exchanges() -> None:
    graph = load_model(Net("none"), ModelOptions(train=True), (torch.randn(8, 4, 16),)).graph
    wanted = request((2,), train=True, optimizer="sgd")
    assert wanted.mesh is not None
    plan = search_plan(graph, wanted)
    analysis = analyse(graph, train=True)
    micro = plan.execution(analysis).micro
    prices = MeshPrices(cluster=wanted.cluster, mesh=wanted.mesh)
    assert not hidden_by_layer(micro.program, analysis, prices, micro.schedule)
