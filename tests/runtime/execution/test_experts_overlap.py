"""Steps of layers of experts on ranks whose collectives take stated times: what runs beside the
exchanges of their rows hides these, by as much as the player says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from autopar.costmodel import load_cluster
from autopar.costmodel.step.merged_pair import AHEAD, BACK, passes_seconds
from autopar.costmodel.step.pipeline_simulation import simulate
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.order import beside
from autopar.order.execution import Execution
from autopar.order.pipeline import neighbours, pipeline_order
from autopar.order.times import Times as StageTimes
from autopar.planning.model.pins import Pins
from autopar.planning.planner import search_plan
from autopar.runtime.models.model_values import model_values
from autopar.sharding.analysis import analyse
from tests.end_to_end.models import Called, tokens
from tests.end_to_end.plans import request
from tests.end_to_end.small_types import small_configuration
from tests.runtime.stated_times import Model, Prices, Times, all_played, measured

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("strict_ranks")

NEAR = 0.01
PLAIN: Mapping[str, Any] = {}
TIMES = replace(Times(), kinds={**Times().kinds, "all_to_all": 0.05, "all_gather": 0.001})
STAGED = replace(TIMES, kinds={**TIMES.kinds, "send": 0.004, "receive": 0.004})


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    """Four layers of experts, with shared ones."""
    kind = "qwen2_moe"
    keys = {k: v for k, v in small_configuration(kind).items() if k != "model_type"}
    config = transformers.Qwen2MoeConfig(**keys)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = transformers.AutoModelForCausalLM.from_config(
            config, experts_implementation="grouped_mm"
        )
    inputs = (tokens(8, 16),)
    return load_model(Called(module, "input_ids", use_cache=False), ModelOptions(), inputs)


def _execution(
    model: LoadedModel,
    sizes: Sequence[int],
    option: str,
    inside: Mapping[str, Any] = PLAIN,
    **options: Any,
) -> Execution:
    wanted = request(sizes, train=True, optimizer="sgd", **options)
    assert wanted.mesh is not None
    names = [axis.name for axis in wanted.mesh.axes]
    pins = Pins(operators={"*experts/experts": dict(zip(names, option.split(), strict=True))})
    plan = search_plan(model.graph, replace(wanted, limits=pins))
    changed = plan.schedule.model_copy(update=inside)
    plan = plan.model_copy(update={"schedule": changed})
    return plan.execution(analyse(model.graph, train=True))


def _step(model: LoadedModel, plan: Execution) -> tuple[float, float]:
    """The seconds of a step as measured and as played."""
    assert model.inputs is not None
    subject = Model(analyse(model.graph, train=True), model_values(model), model.inputs)
    return measured([plan], subject, TIMES)[0], all_played([plan], TIMES)[0]


def test_shared_experts_hide_exchanges(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, wanted = _step(model, _execution(model, (2,), "e+t"))
    monkeypatch.setattr(beside, "_products", lambda step: 0.0)
    waited, played = _step(model, _execution(model, (2,), "e+t"))
    assert (hidden, waited) == pytest.approx((wanted, played), rel=0.05)
    assert waited - hidden == pytest.approx(played - wanted, rel=NEAR)
    assert hidden < 0.95 * waited


@pytest.mark.parametrize(
    ("sizes", "option"),
    [
        ((2,), "e+t"),
        pytest.param((2, 2), "e+t:once e+t:once", marks=[pytest.mark.slow, pytest.mark.ci]),
    ],
)
def test_exchanges_hide_under_another_micro_batch(
    model: LoadedModel, sizes: Sequence[int], option: str
) -> None:
    plans = [
        # Of the batch of eight each rank has one sequence in each micro-batch.
        _execution(
            model,
            sizes,
            option,
            {"micro_batches": 8 // math.prod(sizes), "overlap_experts": merged},
        )
        for merged in (False, True)
    ]
    (waited, played), (hidden, wanted) = (_step(model, plan) for plan in plans)
    assert (hidden, waited) == pytest.approx((wanted, played), rel=0.05)
    assert waited - hidden == pytest.approx(played - wanted, rel=0.1)
    assert hidden < 0.97 * waited


def _simulated(plan: Execution) -> float:
    """The seconds of a step of stages whose passes and pairs take as long as they are played."""
    forward, backward, pair = (
        [
            passes_seconds(
                chunk.micro,
                Prices(cluster=load_cluster("dgx-a100"), mesh=chunk.mesh, times=STAGED),
                STAGED.seconds_in(chunk.micro),
                passes,
                slowdown=1.0,
            )
            for chunk in plan.chunks
        ]
        for passes in ([AHEAD], [BACK], [(AHEAD, BACK)])
    )
    saved = (f + b - both for f, b, both in zip(forward, backward, pair, strict=True))
    hidden = [max(seconds, 0.0) for seconds in saved]
    times = StageTimes.of(forward, backward, 0.0, STAGED.kinds["send"], hidden=hidden)
    count = plan.schedule.micro_batches
    edges = neighbours(plan.stages)
    return simulate(pipeline_order(plan.pipeline, plan.stages, count, edges=edges), times).seconds


def test_exchanges_hide_under_another_micro_batch_of_a_stage(model: LoadedModel) -> None:
    """Two stages of two ranks; the pairs of a stage are as short as the player says."""
    subject = Model(analyse(model.graph, train=True), model_values(model), model.inputs or ())
    steps = []
    for name in ("1f1b", "merged_1f1b"):
        plan = _execution(
            model, (2,), "e+t", stages=2, micro_batches=4, schedule=name, interleave=1
        )
        steps.append((measured([plan], subject, STAGED)[0], _simulated(plan)))
    (waited, played), (hidden, wanted) = steps
    # The player's backward passes of masks and tables count for either stage.
    assert (hidden, waited) == pytest.approx((wanted, played), rel=0.1)
    assert waited - hidden == pytest.approx(played - wanted, rel=NEAR)
    assert hidden < 0.97 * waited
