"""Layers of experts, and what runs beside the exchanges of their rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.costmodel.memory.peak import predicted_memory
from autopar.frontends.load import ModelOptions, load_model
from autopar.order.beside import beside_of, travels, works_before
from autopar.order.scheduled import Scheduled
from autopar.order.value_flow import makes, reads
from autopar.plan import Plan
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.program import Compute, Program
from tests.end_to_end.plans import request

transformers = pytest.importorskip("transformers")

pytestmark = [pytest.mark.slow, pytest.mark.ci]
LAYERS = 3
PLAIN: Mapping[str, Any] = {}


class Net(nn.Module):
    """Layers of four experts, with or without a shared one, which comes first or last."""

    def __init__(self, shared: str) -> None:
        super().__init__()
        keys = {"hidden_size": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        config = transformers.MixtralConfig(intermediate_size=32, **keys)
        config._experts_implementation = "grouped_mm"
        block = transformers.models.mixtral.modeling_mixtral.MixtralSparseMoeBlock
        self.shared = shared
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(LAYERS))
        self.experts = nn.ModuleList(block(config) for _ in range(LAYERS))
        self.alone = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(LAYERS)
        )
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for norm, experts, alone in zip(self.norms, self.experts, self.alone, strict=True):
            here = norm(x)
            first = alone(here) if self.shared == "first" else 0.0
            # Earlier versions of transformers return the router's scores, too.
            routed = experts(here)
            routed = routed[0] if isinstance(routed, tuple) else routed
            last = alone(here) if self.shared == "last" else 0.0
            x = x + (routed + first + last)
        return x.square().mean()


@functools.cache
def _plan(shared: str) -> tuple[Plan, Analysis]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = Net(shared)
    graph = load_model(net, ModelOptions(train=True), (torch.randn(8, 4, 16),)).graph
    wanted = request((2,), train=True, optimizer="sgd")
    assert wanted.mesh is not None
    layers = [op.name for op in graph.operators if op.kind == "autopar.experts"]
    assert len(layers) == LAYERS
    axes = {axis.name: "e+t" for axis in wanted.mesh.axes}
    limits = Pins(operators=dict.fromkeys(layers, axes))
    return search_plan(graph, replace(wanted, limits=limits)), analyse(graph, train=True)


def _scheduled(shared: str, schedule: Mapping[str, Any] = PLAIN) -> tuple[Scheduled, Analysis]:
    plan, analysis = _plan(shared)
    changed = plan.schedule.model_copy(update=schedule)
    return plan.model_copy(update={"schedule": changed}).execution(analysis).micro, analysis


def _beside(plan: Scheduled) -> list[set[str]]:
    """The kinds of what stands between each layer and the first reader of its result."""
    program = plan.program
    kinds = []
    for segment in plan.segments:
        for number, index in enumerate(segment.steps):
            if travels(program.steps[index], program.assignment.mesh.shape):
                between = beside_of(program, segment.steps[number:])
                kinds.append({_kind(program, other) for other in between})
    return kinds


def _kind(program: Program, index: int) -> str:
    step = program.steps[index]
    return step.operator.kind if isinstance(step, Compute) else ""


def _is_in_order(plan: Scheduled) -> bool:
    """Whether every step reads what steps before it have made, or no step makes."""
    steps = plan.program.steps
    made = {place for step in steps for place in makes(step)}
    order = [steps[index] for index in plan.order]
    there = itertools.accumulate((set(makes(step)) for step in order), set.union, initial=set())
    return len(order) == len(steps) and all(
        place not in made or place in known
        for step, known in zip(order, there, strict=False)
        for place in reads(step)
    )


@pytest.mark.parametrize("shared", ["first", "last"])
@pytest.mark.parametrize("unit_bytes", [1, 2**25])
def test_shared_experts_stand_beside_the_layer(shared: str, unit_bytes: int) -> None:
    plan, _ = _scheduled(shared, {"unit_bytes": unit_bytes})
    kinds = _beside(plan)
    assert len(kinds) == LAYERS
    assert all({"aten.linear.default", "aten.gelu.default"} <= some for some in kinds)
    assert _is_in_order(plan)
    for segment in plan.segments:
        works = works_before(plan.program, segment.steps)
        # Of two products one covers the way there, and the other the way back.
        for place, layers in works.items():
            for layer in layers:
                between = segment.steps[segment.steps.index(layer) : segment.steps.index(place)]
                products = [_kind(plan.program, index) for index in between]
                assert products.count("aten.linear.default") == 1


def test_without_shared_experts_a_layer_runs_as_one() -> None:
    plan, _ = _scheduled("none")
    assert not any(_beside(plan))
    assert not any(works_before(plan.program, segment.steps) for segment in plan.segments)


@pytest.mark.parametrize("shared", ["none", "first"])
def test_merged_passes_have_each_layer_in_a_segment_of_its_own(shared: str) -> None:
    schedule = {"micro_batches": 4, "overlap_experts": True}
    plan, _ = _scheduled(shared, schedule)
    assert _is_in_order(plan)
    working = [number for number, segment in enumerate(plan.segments) if segment.working]
    assert len(working) == LAYERS
    for number in working:
        segment = plan.segments[number]
        assert segment.steps[0] == segment.working[0]
        assert plan.segments[number - 1].leaving == segment.working
        assert plan.segments[number + 1].arriving == segment.working
    # Between the segments that send and those that receive run some of the other micro-batch.
    actions = [action for action in plan.actions() if action.segment is not None]
    last = {(a.micro_batch, a.word): number for number, a in enumerate(actions)}
    inside = actions[len(plan.segments) : last[3, "F"]]
    for action, after in itertools.pairwise(inside):
        sends = plan.needs()[action.segment or 0].sets_off[action.word == "B"]
        assert not sends or after.micro_batch != action.micro_batch


def test_merged_passes_issue_what_passes_alone_issue() -> None:
    plans = [
        _scheduled("first", {"micro_batches": 4, "overlap_experts": merged})[0]
        for merged in (False, True)
    ]
    alone, merged = ([str(c) for c in plan.collectives()] for plan in plans)
    assert alone != merged and sorted(alone) == sorted(merged)


def test_merged_passes_hold_little_more_than_one_micro_batch() -> None:
    alone, merged = (
        _memory(_scheduled("first", {"micro_batches": 4, "overlap_experts": merged}))
        for merged in (False, True)
    )
    # What the one releases the other takes, but for the first piece and the messages.
    assert alone < merged < 1.5 * alone


def _memory(planned: tuple[Scheduled, Analysis]) -> float:
    """The bytes that the passes need at the peak."""
    memory = predicted_memory(planned[0], planned[1], optimizer="sgd")
    return memory.activations + memory.transient


def test_recomputed_layers_run_in_one_piece() -> None:
    plan, _ = _scheduled("first")
    names = [
        step.operator.name
        for index in plan.order
        if isinstance(step := plan.program.steps[index], Compute)
        and "experts.1" in step.operator.name
    ]
    schedule = {"micro_batches": 4, "overlap_experts": True, "recompute": (tuple(names),)}
    plan, _ = _scheduled("first", schedule)
    assert sum(bool(segment.working) for segment in plan.segments) == LAYERS - 1
    assert _is_in_order(plan)
