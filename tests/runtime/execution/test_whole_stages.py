"""Stages whose parameters are gathered once a step and stay whole for all of its micro-batches.

That is FSDP2 under torch's pipelines (`reshard_after_forward=False`), and with a further axis that
splits the batch alone its hybrid sharding: gradients of one device, collectives as priced, each
gather and reduction once a step, and the memory of whole parameters and gradients.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from autopar.api import plan_loaded
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.order.actions import Word
from autopar.order.execution import Execution
from autopar.order.ranks import rank_order
from autopar.order.schedules import SCHEDULES
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.models.model_values import model_values
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.world import World
from autopar.runtime.stand_ins import StandIn
from autopar.sharding.analysis import analyse
from autopar.sharding.schedule import Schedule
from benchmarks.tracked_memory import _total, _Tracker, _unhook
from tests.runtime.nets import MODES, gradients_alone, net, pipelined, trained

ROWS = 32
MESHES: Mapping[str, tuple[tuple[int, ...], ...]] = {
    "4": ((2,), (2,)),
    "8": ((2,),) * 4,
    "8 hybrid": ((2, 2), (2, 2)),
}
"""The meshes of the stages, by their ranks."""


def _plans(name: str) -> list[Execution]:
    """Every schedule with 1, 4 and 8 micro-batches."""
    _, analysis, _ = net(ROWS)
    return [
        pipelined(
            analysis,
            MESHES[name],
            pipeline=row.name,
            interleave=2 if row.chunks else 1,
            schedule=Schedule(micro_batches=count, **MODES["once"]),
            hybrid="hybrid" in name,
        )
        for row, count in itertools.product(SCHEDULES.values(), (1, 4, 8))
        if not row.chunks or count % len(MESHES[name]) == 0
    ]


@pytest.mark.parametrize("name", MESHES)
def test_units_are_gathered_and_reduced_once_a_step(name: str) -> None:
    for plan in _plans(name):
        for stage in range(plan.stages):
            order = rank_order(plan, stage, train=True)
            firsts = Counter(
                (action.word, action.chunk, action.unit)
                for action in order
                if action.word in (Word.GATHER, Word.RELEASE, Word.REDUCE) and not action.round
            )
            assert set(firsts.values()) == {1}
            gathered = {(chunk, unit) for word, chunk, unit in firsts if word is Word.GATHER}
            released = {(chunk, unit) for word, chunk, unit in firsts if word is Word.RELEASE}
            assert gathered == released and gathered


@pytest.mark.parametrize("name", MESHES)
def test_gradients_of_one_device(name: str) -> None:
    plans = _plans(name)
    module, _, x = net(ROWS)
    ranks = plans[0].devices
    results = run_ranks(trained, ranks, plans, module, x, gradients_alone(module, x))
    assert results == [[""] * len(plans)] * ranks


class Residual(nn.Module):
    """A product that is four times as wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.down(torch.relu(self.up(self.norm(x))))
        return made


class Layers(nn.Module):
    """Equal layers, and the mean square of their result."""

    def __init__(self, width: int = 256, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Residual(width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _model() -> LoadedModel:
    torch.manual_seed(0)
    return load_model(Layers(), ModelOptions(train=True), (torch.randn(64, 16, 256),))


def _peak(plan: Plan) -> int:
    """Bytes of this rank at the peak of a step, by torch's tracker."""
    model = _model()
    run = plan.execution(analyse(model.graph, train=True))
    ours = ParallelModule(run, World.of(run), model_values(model))
    assert model.inputs is not None
    for stage in ours.engine.stages.values():
        _unhook(stage)
    # Those of other stages have a shape and no memory, which the tracker would count.
    own = [p for p in ours.parameters() if not isinstance(p, StandIn)]
    optimizer = torch.optim.AdamW(own, foreach=False)

    def step() -> None:
        ours.loss(*model.inputs).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    step()
    tracker = _Tracker()
    tracker.track_external(*own, optimizer)
    with tracker:
        step()
    return _total(tracker, "peak")


@pytest.mark.parametrize(
    "schedule", ["1f1b", pytest.param("gpipe", marks=(pytest.mark.slow, pytest.mark.ci))]
)
def test_stages_take_the_memory_that_is_stated(schedule: str) -> None:
    """Whole parameters and whole gradients, beside the shards of states."""
    scheme = f"pipeline-{schedule} 2 x data 2 (zero1)"
    asked = {"devices": 4, "micro_batches": 4, "recompute": "none", "scheme": scheme}
    plan = plan_loaded(_model(), cluster="local-cpu", **asked).plan
    # What is on its way is not counted by stage, so it should be little.
    small = plan.schedule.model_copy(update={"unit_bytes": 2**18})
    peaks = run_ranks(_peak, 4, plan.model_copy(update={"schedule": small}))
    for number, stage in enumerate(plan.stages):
        assert stage.memory == pytest.approx(max(peaks[2 * number : 2 * number + 2]), rel=0.1)
