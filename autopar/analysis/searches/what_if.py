"""The best plan under changed conditions.

The conditions are memory, link speeds, devices, batch, and forced strategies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.api import Planned, plan_loaded
from autopar.costmodel import Cluster
from autopar.errors import UsageError, unknown
from autopar.model import LoadedModel
from autopar.options.checking import checked
from autopar.plan import Plan
from autopar.plan_origin import cluster_of_plan, model_of_batch, model_of_plan
from autopar.planning.model.progress import Progress
from autopar.schemes import stages_of
from autopar.units import parse_rate

from .sensitivity import scaled_links

OUTER_CHOICES = (
    "mesh",
    "stages",
    "micro_batches",
    "recompute",
    "zero",
    "offload",
    "schedule",
    "interleave",
)
FIXABLE = (*OUTER_CHOICES, "pins", "scheme")


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """The changed conditions of a plan; what is None or empty stays as the plan has it.

    `memory`: bytes per device, or a text with a unit. `links`: by level of the cluster a factor or
    a bandwidth. `fixed`: choices by name, of `FIXABLE`. `keep`: whether the plan's own outer
    choices stay where `fixed` has none.
    """

    memory: float | str | None = None
    links: Mapping[str, float | str] = field(default_factory=dict)
    devices: int | None = None
    cluster: str | Path | Cluster | None = None
    target: str | None = None
    batch: int | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)
    keep: bool = False

    def __post_init__(self) -> None:
        wrong = [name for name in self.fixed if name not in FIXABLE]
        if wrong:
            conditions = ("memory", "links", "devices", "cluster", "target", "batch", "keep")
            raise UsageError(unknown("argument", wrong[0], (*FIXABLE, *conditions)))


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSource:
    """The source of a plan's model: the arguments that `autopar.plan` was given."""

    model: Any
    example_inputs: Any = None
    loss: Any = None
    trust: bool = False

    def load(self, plan: Plan, batch: int | None) -> LoadedModel:
        """The model with the plan's sizes, or with another batch."""
        if batch is None:
            return model_of_plan(
                self.model, plan, self.example_inputs, loss=self.loss, trust=self.trust
            )
        if not isinstance(self.model, str | Path):
            raise UsageError(
                "another batch needs the model by its name or file; "
                "of a module, export it with other example inputs"
            )
        return model_of_batch(self.model, plan, batch, loss=self.loss, trust=self.trust)


def replan(
    plan: Plan, source: ModelSource, changes: Changes, progress: Progress | None = None
) -> Planned:
    """Plan the model of `plan` again under changed conditions."""
    values = checked(
        {
            "memory": changes.memory,
            "devices": changes.devices,
            "batch": changes.batch,
            **changes.fixed,
        }
    )
    cluster = scaled(cluster_of_plan(plan, changes.cluster, changes.target), changes.links)
    devices = values.pop("devices")
    if devices is not None:
        cluster = cluster.sized(devices)
    loaded = source.load(plan, values.pop("batch"))
    wanted = {name: value for name, value in values.items() if value is not None}
    if changes.keep:
        wanted = {**_outer_choices(plan, cluster.devices), **wanted}
    return plan_loaded(
        loaded,
        cluster=cluster,
        target=changes.target or plan.target,
        mode=plan.model.mode,
        optimizer=plan.model.optimizer,
        master=plan.schedule.master,
        reduce=plan.schedule.reduce,
        progress=progress,
        **wanted,
    )


def scaled(cluster: Cluster, links: Mapping[str, float | str]) -> Cluster:
    """The cluster with other bandwidths."""
    levels = {level.name: level for level in cluster.levels}
    for name, value in links.items():
        if name not in levels:
            raise UsageError(unknown("level", name, levels))
        factor = parse_rate(value, levels[name].bandwidth, f"link {name}")
        cluster = scaled_links(cluster, name, factor)
    return cluster


def _outer_choices(plan: Plan, devices: int) -> dict[str, Any]:
    """The plan's choices in the outer search; stages that differ cannot be kept."""
    if any(stage.mesh != plan.mesh for stage in plan.stages):
        raise UsageError("the plan's stages are on different meshes, which cannot be kept")
    schedule = plan.schedule
    choices: dict[str, Any] = {"stages": stages_of(plan), "micro_batches": schedule.micro_batches}
    if devices == plan.devices:
        choices["mesh"] = tuple(axis.size for axis in plan.mesh)
    if plan.model.mode == "train":
        if not any(schedule.recompute):
            choices["recompute"] = "none"
        if plan.stages:
            choices["schedule"] = schedule.pipeline
            choices["interleave"] = schedule.interleave
    return {name: value for name, value in choices.items() if value is not None}
