"""Steps on ranks whose collectives and operators take stated times last as long as they are played.

Each collective is held for as long as a link would take for it, in the order of its queue. So the
step is as long as its order makes it: what hides hides, and what is waited for is waited for.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.costmodel.step import issuer
from autopar.costmodel.step.pipeline_simulation import simulate
from autopar.frontends.load import ModelOptions, load_model
from autopar.order.execution import Chunk, Execution, execution
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.scheduled import scheduled
from autopar.order.times import Times as StageTimes
from autopar.runtime.module import batches
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.analysis import analyse
from autopar.sharding.layout import S
from autopar.sharding.schedule import UNIT_BYTES, Schedule
from tests.runtime.graphs import GRAPHS
from tests.runtime.helpers import mesh_of, random_inputs, random_program, random_values
from tests.runtime.nets import MODES, parameters_of, pipelined
from tests.runtime.stated_times import SLOW, Model, Times, all_played, measured, played
from tests.sharding.direct_assignment import pinned_assignment

pytestmark = pytest.mark.usefixtures("strict_ranks")

LAYERS = 5
STAGES = [
    *(("gpipe", 2, 1), ("1f1b", 2, 1), ("1f1b", 4, 1), ("gpipe", 4, 1), ("interleaved", 2, 2)),
    ("merged_1f1b", 2, 1),
]
"""Pipelines: schedule, stages, chunks of each."""
WIDTH = 8
UNIT = 4 * (WIDTH * WIDTH + WIDTH)
"""Bytes of a layer, which is a unit."""
SIZES = [(2,), (2, 2)]
CHAINS = (2, 2)
"""A mesh on which a unit is a chain of two collectives."""
EXACT = 0.002
"""The share of a step for the player's copies, which take no time on a virtual clock."""


@pytest.fixture(autouse=True)
def few_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks compare their batches in one call alone."""
    monkeypatch.setattr(batches, "FIRST", 1)


# --- plans ---


class Net(nn.Module):
    """Layers of equal size."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def model() -> Model:
    """The layers and a batch."""
    return _model(LAYERS)


def _model(layers: int) -> Model:
    torch.manual_seed(0)
    module = Net(layers)
    batch = torch.randn(24, WIDTH)
    graph = load_model(module, ModelOptions(train=True), (batch,)).graph
    return Model(analyse(graph, train=True), parameters_of(module), [batch])


def _data_parallel(model: Model, sizes: tuple[int, ...], schedule: Schedule) -> Execution:
    """The batch over all axes, parameters stored split over all of them."""
    mesh = mesh_of(sizes)
    wanted = {op.name: [S(0)] * len(sizes) for op in model.analysis.warm}
    assignment = pinned_assignment(model.analysis, mesh, wanted, split_storage=range(len(sizes)))
    return execution(assignment, model.analysis, replace(schedule, unit_bytes=UNIT))


def _modes(model: Model, sizes: tuple[int, ...], **options: Any) -> list[Execution]:
    """ZeRO 1, 2 and 3 with one and three micro-batches."""
    return [
        _data_parallel(model, sizes, Schedule(micro_batches=count, **mode, **options))
        for mode, count in itertools.product(MODES.values(), (1, 3))
    ]


def _alternating(model: Model, schedule: Schedule) -> Execution:
    """Layers in turn with their batch split, and with their features split and no gathered weight:
    values change their layout on the axis over which parameters are gathered.
    """
    wanted = {}
    layer = 0
    for op in model.analysis.warm:
        features = layer % 2 == 1 and op.kind in ("aten.linear.default", *SLOW)
        wanted[op.name] = [S(1) if features else S(0)]
        layer += op.kind in SLOW
    assignment = pinned_assignment(model.analysis, mesh_of((2,)), wanted, split_storage=(0,))
    return execution(assignment, model.analysis, replace(schedule, unit_bytes=UNIT))


# --- what hides ---


@pytest.mark.parametrize("sizes", SIZES)
def test_a_step_takes_as_long_as_it_is_played(model: Model, sizes: tuple[int, ...]) -> None:
    times = Times()
    plans = _modes(model, sizes)
    for plan in plans:
        rounds = {plan.micro.gather_rounds(unit.number) for unit in plan.micro.units}
        assert rounds == {len(sizes)}, "one collective for each axis"
    assert measured(plans, model, times) == pytest.approx(all_played(plans, times), rel=EXACT)


def test_a_chain_that_is_not_begun_early_is_waited_for(model: Model) -> None:
    times = Times()
    early = all_played(_modes(model, CHAINS), times)
    plans = _modes(model, CHAINS, prefetch=0)
    late = measured(plans, model, times)
    assert late == pytest.approx(all_played(plans, times), rel=EXACT)
    # Gathers of all layers but the first would hide, at the least once a step.
    hidden = (LAYERS - 1) * len(CHAINS) * times.kinds["all_gather"]
    assert all(long > short + hidden / 2 for long, short in zip(late, early, strict=True))


def test_reductions_hide_under_the_backward_pass(model: Model) -> None:
    """A step gains little if they take no time."""
    times = Times()
    free = replace(times, kinds={**times.kinds, "reduce_scatter": 0.0})
    plans = _modes(model, CHAINS)
    without = measured(plans, model, free)
    assert without == pytest.approx(all_played(plans, free), rel=EXACT)
    for plan, least in zip(plans, without, strict=True):
        timeline = played(plan, times)
        reductions = [e for e in timeline.events if e.kind == "reduce_scatter"]
        assert len(reductions) >= LAYERS * len(CHAINS)
        assert timeline.step - least < sum(e.end - e.start for e in reductions) / 2


def test_parameters_and_values_on_one_axis_do_not_wait_for_each_other(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = replace(Times(), kinds={**Times().kinds, "all_gather": 0.06})
    plans = [_alternating(model, Schedule(**mode)) for mode in MODES.values()]
    assert all(plan.micro.value_groups() & plan.micro.unit_groups() for plan in plans)
    apart = measured(plans, model, times)
    assert apart == pytest.approx(all_played(plans, times), rel=EXACT)
    monkeypatch.setattr(issuer, "PARAMETERS", "")
    monkeypatch.setattr(DeviceGroups, "of_parameters", DeviceGroups.over)
    together = measured(plans, model, times)
    assert together == pytest.approx(all_played(plans, times), rel=EXACT)
    assert all(long > 1.1 * short for long, short in zip(together, apart, strict=True))


def test_random_plans_take_as_long_as_they_are_played() -> None:
    """Values on all ways and chains of several axes; a rank waits for what it reads of a unit, and
    the player for the whole unit.
    """
    graph = GRAPHS["mlp"]()
    model = Model(analyse(graph, train=True), random_values(graph), random_inputs(graph))
    programs = [random_program(graph, mesh_of(CHAINS), seed) for seed in range(40, 44)]
    plans = []
    for program, mode in itertools.product(programs, MODES.values()):
        plan = scheduled(program, Schedule(unit_bytes=UNIT_BYTES, **mode))
        plans.append(Execution(chunks=(Chunk(whole=plan, micro=plan, split=None),)))
    times = Times()
    ratios = [
        actual / wanted
        for actual, wanted in zip(
            measured(plans, model, times), all_played(plans, times), strict=True
        )
    ]
    assert max(ratios) < 1 + EXACT and min(ratios) > 0.9, ratios


@pytest.mark.parametrize(("name", "stages", "interleave"), STAGES)
def test_messages_between_stages_come_under_the_pass_before(
    name: str, stages: int, interleave: int
) -> None:
    """Stages of several segments are idle for as long as the schedule's simulation says."""
    count = 8
    layers = 8
    model = _model(layers)
    schedule = Schedule(micro_batches=count, unit_bytes=UNIT)
    plan = pipelined(
        model.analysis, ((1,),) * stages, pipeline=name, interleave=interleave, schedule=schedule
    )
    assert all(len(chunk.whole.segments) > 1 for chunk in plan.chunks)
    # The ranks' sum over all gradients, for a norm, has no price.
    times = replace(Times(), kinds={"send": 0.012, "receive": 0.012})
    forward, backward = (
        [layers / stages * each] * stages for each in (times.forward, times.backward)
    )
    wanted = simulate(
        pipeline_order(name, stages, count, interleave, edges=neighbours(stages * interleave)),
        StageTimes.of(forward, backward, send=times.kinds["send"]),
        interleave,
    )
    assert measured([plan], model, times) == pytest.approx([wanted.seconds], rel=EXACT)
