"""Seconds of the host for each action of a step, from steps of small trainings on the ranks.

Kernels and messages have been measured by then. The trainings are priced on the cluster as any plan
is, and the host's seconds are those by which the price is what was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from autopar.analysis.program.step_parts import stepping_of
from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.calibration.host_times import fit_host
from autopar.costmodel.cluster.source import Source
from autopar.costmodel.device.host_actions import HOST_ACTIONS
from autopar.errors import AutoparError
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.sharding.analysis import analyse

HEADS = 4
HEAD = 16
"""The least heads of a layer, and their width."""
SAMPLES = 4
SEQUENCE = 8
"""Samples for each rank, and their rows."""
TRAININGS: Mapping[str, tuple[str, int, dict[str, Any]]] = {
    "few operators": ("chain", 8, {"scheme": "data"}),
    "many operators": ("chain", 72, {"scheme": "data"}),
    "many parameters": ("products", 24, {"scheme": "data"}),
    "parameters in micro-batches": ("products", 24, {"scheme": "data", "micro_batches": SAMPLES}),
    "layers": ("layers", 3, {"scheme": "data"}),
    "micro-batches": ("layers", 3, {"scheme": "data", "micro_batches": SAMPLES}),
    "parameters gathered": ("layers", 3, {"scheme": "zero3"}),
    "layers split": ("layers", 3, {"scheme": "megatron"}),
    "stages": ("layers", 0, {"micro_batches": SAMPLES, "schedule": "1f1b"}),
}
"""The model, its size (0: one layer a rank) and the plan of each training.

Every action of `HOST_ACTIONS` is frequent in one of them and rare in another.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A small model with its plan."""

    name: str
    model: LoadedModel
    plan: Plan


def small_trainings(ranks: int) -> list[Training]:
    """The trainings that there are for so many ranks of one host."""
    from autopar.api import plan_loaded
    from autopar.frontends.load import ModelOptions, load_model
    from autopar.runtime.measuring.small_trainings import small_batch, small_model

    cluster = load_cluster("local-cpu").sized(ranks)
    # Each rank has equally many of the heads.
    width = HEAD * ranks * -(-HEADS // ranks)
    batch = small_batch(width, SAMPLES * ranks, SEQUENCE)
    trainings = []
    for name, (kind, size, asked) in TRAININGS.items():
        model = load_model(
            small_model(kind, width, size or ranks), ModelOptions(train=True), (batch,)
        )
        stages: dict[str, Any] = {} if size else {"stages": ranks}
        try:
            plan = plan_loaded(
                model, devices=ranks, cluster=cluster, fewer=False, **asked, **stages
            )
        except AutoparError:
            # Other numbers of ranks leave some plans out, whose actions are then not told apart.
            continue
        trainings.append(Training(name=name, model=model, plan=plan.plan))
    return trainings


def steps_of(trainings: Sequence[Training]) -> dict[object, Callable[[], object]]:
    """On a rank: the step of each training, by its name."""
    from autopar.runtime.measuring.small_trainings import planned_step

    return {one.name: planned_step(one.model, one.plan) for one in trainings}


def with_host(
    cluster: Cluster, trainings: Sequence[Training], repeats: Mapping[str, Sequence[float]]
) -> Cluster:
    """The cluster with the host's seconds by which it prices the trainings as measured."""
    steps = [
        stepping_of(one.plan, analyse(one.model.graph, train=True)).seconds for one in trainings
    ]

    def price(host: Mapping[str, float]) -> list[float]:
        known = with_figures(cluster, host)
        return [step(known) for step in steps]

    fitted = fit_host(price, [repeats[one.name] for one in trainings])
    sources = {f"device.host.{action}": Source.of(fitted.source) for action in HOST_ACTIONS}
    return replace(with_figures(cluster, fitted.seconds), sources={**cluster.sources, **sources})


def with_figures(cluster: Cluster, host: Mapping[str, float]) -> Cluster:
    """The cluster with these seconds of the host."""
    return replace(cluster, device=replace(cluster.device, host=host))
