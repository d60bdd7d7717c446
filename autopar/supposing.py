"""The best plan under changed conditions: memory, link speeds, devices, batch, or forced strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.costmodel import Cluster

from .api import Planned, plan_loaded
from .errors import UsageError, unknown
from .model import LoadedModel
from .plan import Plan
from .plan_origin import cluster_of_plan, model_of_batch, model_of_plan
from .planning.ranking import Progress
from .report.given import checked
from .report.page.difference import difference_tables
from .report.printing import Table, plain
from .report.sensitivity import scaled_links
from .report.units import bytes_text, parse_rate, seconds_text
from .schemes import scheme_of, stages_of
from .sharding.analysis import analyse

KEPT = ("mesh", "stages", "micro_batches", "recompute", "zero", "offload", "schedule", "interleave")


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """A plan, the conditions `asked` in words, and the plan found under them."""

    plan: Plan
    asked: tuple[str, ...]
    planned: Planned

    @property
    def other(self) -> Plan:
        """The plan found."""
        return self.planned.plan

    def summary(self) -> str:
        """The answer in a sentence or two."""
        here, there = self.plan.predicted, self.other.predicted
        named = scheme_of(self.other, analyse(self.planned.model.graph, train=self.other.model.mode == "train")).called
        times = f"{there.step / here.step:.2f} times as long" if here.step > 0 else "not comparable"
        same = self.other.operators == self.plan.operators and self.other.mesh == self.plan.mesh and self.other.stages == self.plan.stages
        return (
            f"With {', '.join(self.asked) or 'nothing changed'}, a step takes {seconds_text(there.step)}, {times} as the plan's "
            f"{seconds_text(here.step)}, and needs {bytes_text(there.memory)} where the plan needs {bytes_text(here.memory)}. "
            + ("The strategies stay as they are." if same else f"The best plan is then {named}.")
        )  # fmt: skip

    def tables(self) -> tuple[Table, ...]:
        """Figures side by side, and differences in splits and storage."""
        return difference_tables(self.plan, self.other)

    def __repr__(self) -> str:
        return f"WhatIf({', '.join(self.asked)}: {self.plan.predicted.step:.4g} s -> {self.other.predicted.step:.4g} s a step)"

    def __str__(self) -> str:
        return "\n\n".join([self.summary(), *map(plain, self.tables())])


def what_if(
    plan: Plan,
    model: Any,
    example_inputs: Any = None,
    *,
    memory: float | str | None = None,
    links: Mapping[str, float | str] | None = None,
    devices: int | None = None,
    cluster: str | Path | Cluster | None = None,
    batch: int | None = None,
    keep: bool = False,
    loss: str | Callable[..., Any] | None = None,
    trust: bool = False,
    progress: Progress | None = None,
    **pinned: Any,
) -> WhatIf:
    """Plan the model of `plan` again under changed conditions, and compare the two plans.

    `memory`: bytes per device, or a text such as "40GiB". `links`: by level of the cluster a factor (0.5, "2x") or a
    bandwidth ("100GB/s"). `devices`, `cluster`, `batch`: replace those of the plan. `pinned`: choices to fix, as for
    `autopar.plan`: `pins`, `scheme`, `mesh`, `stages`, `micro_batches`, `recompute`, `zero`, `offload`, `schedule`,
    `interleave`. `keep`: whether the plan's own choices of these stay where `pinned` has none; otherwise all is
    searched again. Raises the errors of `autopar.errors`.
    """
    wrong = [name for name in pinned if name not in (*KEPT, "pins", "scheme")]
    if wrong:
        raise UsageError(unknown("argument", wrong[0], (*KEPT, "pins", "scheme", "memory", "links", "devices", "cluster", "batch", "keep")))
    given = checked({"memory": memory, "devices": devices, "batch": batch, **pinned})
    sized = cluster_of_plan(plan, cluster)
    changed = scaled(sized, links or {})
    changed = changed.sized(devices) if devices is not None else changed
    loaded = _model(model, plan, example_inputs, given.pop("batch"), loss, trust)
    fixed = {name: value for name, value in given.items() if name != "devices" and value is not None}
    if keep:
        fixed = {**_kept(plan, changed.devices), **fixed}
    planned = plan_loaded(
        loaded, cluster=changed, mode=plan.model.mode, optimizer=plan.model.optimizer, master=plan.schedule.master,
        reduce=plan.schedule.reduce, progress=progress, **fixed,
    )  # fmt: skip
    said = _asked(memory, links or {}, devices, cluster, batch, pinned, keep)
    return WhatIf(plan=plan, asked=tuple(said), planned=planned)


def _model(model: Any, plan: Plan, example_inputs: Any, batch: int | None, loss: Any, trust: bool) -> LoadedModel:
    if batch is None:
        return model_of_plan(model, plan, example_inputs, loss=loss, trust=trust)
    if not isinstance(model, str | Path):
        raise UsageError("another batch needs the model by its name or file; of a module, export it with other example inputs")
    return model_of_batch(model, plan, batch, loss=loss, trust=trust)


def scaled(cluster: Cluster, links: Mapping[str, float | str]) -> Cluster:
    """The cluster with other bandwidths."""
    levels = {level.name: level for level in cluster.levels}
    for name, value in links.items():
        if name not in levels:
            raise UsageError(unknown("level", name, levels))
        factor = parse_rate(value, levels[name].bandwidth, f"link {name}")
        cluster = scaled_links(cluster, name, factor)
    return cluster


def _kept(plan: Plan, devices: int) -> dict[str, Any]:
    """The plan's choices in the outer search; stages that differ cannot be kept."""
    if any(stage.mesh != plan.mesh for stage in plan.stages):
        raise UsageError("the plan's stages are on different meshes, which cannot be kept")
    schedule, train = plan.schedule, plan.model.mode == "train"
    found: dict[str, Any] = {"stages": stages_of(plan), "micro_batches": schedule.micro_batches}
    if devices == plan.devices:
        found["mesh"] = tuple(axis.size for axis in plan.mesh)
    if train:
        recomputed = sum(map(len, schedule.recompute))
        found["recompute"] = "none" if not recomputed else None
        found |= {"schedule": schedule.pipeline, "interleave": schedule.interleave} if plan.stages else {}
    return {name: value for name, value in found.items() if value is not None}


def _asked(
    memory: float | str | None, links: Mapping[str, float | str], devices: int | None, cluster: object, batch: int | None,
    pinned: Mapping[str, Any], keep: bool,
) -> Sequence[str]:  # fmt: skip
    """The changed conditions, in words."""
    said = [f"{memory if isinstance(memory, str) else bytes_text(memory)} of memory"] if memory is not None else []
    said += [f"{name} at {value if isinstance(value, str) else f'{value:g}x'}" for name, value in links.items()]
    said += [f"{devices} devices"] if devices is not None else []
    said += [f"cluster {cluster.name if isinstance(cluster, Cluster) else cluster}"] if cluster is not None else []
    said += [f"a batch of {batch}"] if batch is not None else []
    for name, value in pinned.items():
        if value is not None and value != () and value != []:
            shown = ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            said.append(f"{name.replace('_', ' ')} {shown}")
    return [*said, *(["the rest of the outer choices as planned"] if keep else [])]
