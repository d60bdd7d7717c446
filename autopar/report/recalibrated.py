"""`recalibrated`: a cluster whose figures are scaled to what a profile of a run measured.

    factor = seconds predicted / seconds measured        of a group of operators, or of the collectives on a level of links

Arithmetic is scaled by the products, convolutions and attention, in the types that they compute in; the memory's bandwidth by all other
operators with the update; a level's bandwidth and its time for a message by its collectives, as their sum does not tell one from the other.
What was not measured, or not predicted, stays; so do the seconds of a launch, which no part of a profile holds alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autopar.costmodel import Cluster, dump
from autopar.costmodel.cluster.level import Level
from autopar.costmodel.cluster.measured import Measured
from autopar.costmodel.cluster.source import Source
from autopar.costmodel.device.model import FAMILIES
from autopar.costmodel.step.estimate import Estimate, estimate, step_seconds, timeline
from autopar.costmodel.step.pricing import MeshPrices
from autopar.costmodel.step.timeline import Overlap

from ..errors import UsageError
from ..ir import Graph
from ..of_plan import cluster_of_plan
from ..order.scheduled import Scheduled
from ..outputs import write_whole
from ..plan import Plan
from ..sharding.analysis import Analysis, analyse
from ..sharding.micro_batches import split_batch
from ..sharding.program import Compute
from ..sharding.rules import RULES
from ..sharding.rules.experts import EXPERTS
from .account import executions
from .measured import kind_of
from .tables import Table
from .units import rate_text, seconds_text

if TYPE_CHECKING:
    from autopar.runtime.profiling import Profile

MOST = 20.0
"""A figure that is off by more is not the same machine, or the run is too small to measure it."""
ARITHMETIC = ("products", "convolutions", "attention")
STREAMS = ("elementwise and others", "update")
FOLDED = {"gloo": {"reduce_scatter": "all_reduce"}}
"""Kinds of collectives that a backend issues, and a profiler so shows, as another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A figure that was scaled: its name in the cluster file, and the seconds of `what` it was scaled by."""

    figure: str
    unit: str
    before: float
    after: float
    what: str
    predicted: float
    measured: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibrated:
    """A cluster as a profile found it; seconds of a step as measured, as predicted before, and on this cluster."""

    cluster: Cluster
    scaled: tuple[Scaled, ...]
    measured: float
    before: float
    after: float

    def save(self, path: str | Path) -> None:
        """Write the cluster file, whole or not at all."""
        write_whole(Path(path), dump(self.cluster))

    def json(self) -> dict[str, Any]:
        """What was scaled and what follows as plain data."""
        rows = [{name: getattr(row, name) for name in Scaled.__dataclass_fields__} for row in self.scaled]
        return {"scaled": rows, "step": {"measured": self.measured, "before": self.before, "after": self.after}}

    def parts(self) -> list[str | Table]:
        """The same in tables."""
        rows = tuple((r.figure, _text(r.before, r.unit), _text(r.after, r.unit), f"{r.after / r.before:.3g}", r.what) for r in self.scaled)
        step = tuple(map(seconds_text, (self.measured, self.before, self.after)))
        return [
            Table(title="Scaled by the profile", columns=("figure", ">before", ">after", ">factor", "measured by"), rows=rows),
            Table(title="A step", columns=(">measured", ">predicted before", ">with the new file"), rows=(step,)),
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Seconds of a step as predicted and as measured, of `what` is measured together."""

    what: str
    predicted: float
    measured: float

    def factor(self, figure: str) -> float:
        """By what rates are multiplied; a `UsageError` where that cannot be."""
        found = self.predicted / self.measured
        if not 1 / MOST <= found <= MOST:
            raise UsageError(
                f"{figure} would be scaled by {found:.3g}: {self.what} took {seconds_text(self.measured)} where "
                f"{seconds_text(self.predicted)} were predicted; beyond a factor of {MOST:.0f} the machine is another than the cluster's, "
                "or the model too small to measure: start from a nearer cluster (--cluster, autopar calibrate), or run a larger model"
            )
        return found


def recalibrated(found: Profile, cluster: str | Path | Cluster | None = None) -> Recalibrated:
    """The cluster (that of the profiled plan, if none is given) with its figures scaled to what `autopar.profile` measured."""
    return recalibrate(found.json(), found.plan, found.graph, cluster_of_plan(found.plan, cluster))


def recalibrate(profile: Mapping[str, Any], plan: Plan, graph: Graph, cluster: Cluster) -> Recalibrated:
    """The same from the profile's plain data, on a cluster of the plan's size."""
    require_one_program(plan, cluster)
    analysis = analyse(graph, train=plan.model.mode == "train")
    micro, count = plan.execution(analysis).micro, plan.schedule.micro_batches
    step = _Step(micro=micro, analysis=split_batch(analysis, count) if count > 1 else analysis, plan=plan)
    before = step.seconds(cluster)
    computed = step.computed(cluster)
    new, rows = cluster, list[Scaled]()
    for kinds, scale in ((ARITHMETIC, _with_arithmetic), (STREAMS, _with_memory)):
        held = [kind for kind in kinds if profile["kinds"].get(kind, 0.0) > 0]
        group = _Group(what=", ".join(held), predicted=computed[kinds], measured=_sum(profile["kinds"], kinds))
        if group.predicted > 0 and group.measured > 0:
            new, more = scale(new, group, step.families)
            rows += more
    for level, group in _links(step.collectives(cluster), profile.get("collectives", {}), cluster.backend).items():
        new, more = _with_links(new, group, level)
        rows += more
    if not rows:
        raise UsageError("the profile measured nothing that the plan predicts: no figure of the cluster can be scaled by it")
    (whole,) = (part["measured"] for part in profile["parts"] if part["part"] == "step")
    return Recalibrated(cluster=new, scaled=tuple(rows), measured=whole, before=before.step, after=step.seconds(new).step)


def require_one_program(plan: Plan, cluster: Cluster) -> None:
    """Refuse what the profile of rank 0 cannot stand for."""
    if plan.stages:
        raise UsageError("a profile is of rank 0, which runs one stage of this plan: recalibrate by a plan without stages (--stages 1)")
    if cluster.joined:
        raise UsageError(f"a profile is of rank 0, one kind of the devices of {cluster.name!r}: recalibrate each pool by itself")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """What a plan's step is made of, to be priced on any cluster; the analysis is that of a micro-batch."""

    micro: Scheduled
    analysis: Analysis
    plan: Plan

    def prices(self, cluster: Cluster) -> MeshPrices:
        return MeshPrices(cluster=cluster, mesh=self.plan.mesh_, unit_bytes=self.plan.schedule.unit_bytes)

    def seconds(self, cluster: Cluster) -> Estimate:
        return estimate(self.micro, self.analysis, self.prices(cluster), optimizer=self.plan.model.optimizer)

    @property
    def computing(self) -> list[tuple[Compute, int, int]]:
        """The operators of a step, each with how often it runs forward and backward."""
        pairs = zip(self.micro.program.steps, executions(self.micro), strict=True)
        warm = ((s, n) for s, n in pairs if isinstance(s, Compute) and s.operator.name not in self.analysis.cold)
        return [(step, times.forward + times.again, times.backward) for step, times in warm]

    @property
    def families(self) -> Mapping[str, str]:
        """The families of types that products compute in, each with a type of it."""
        found: dict[str, str] = {}
        for step, _, _ in self.computing:
            if _is_product(step):
                call = self.analysis.offers[step.operator.name].call
                cast = call.get("compute")
                floats = [tensor.dtype for tensor in call.outputs if tensor.is_float]
                dtype = cast if isinstance(cast, str) else next(iter(floats), "float32")
                found.setdefault(FAMILIES[dtype], dtype)
        return found

    def computed(self, cluster: Cluster) -> dict[tuple[str, ...], float]:
        """Seconds that a step computes, were there no communication beside: in products, and in all else, the update among it."""
        prices, products = self.prices(cluster), 0.0
        for step, forward, backward in self.computing:
            if _is_product(step):
                own = step_seconds(step, self.analysis, prices)
                products += forward * own.forward + backward * own.backward
        alone = timeline(self.micro, self.analysis, prices, optimizer=self.plan.model.optimizer, overlap=Overlap(slowdown=1.0))
        return {ARITHMETIC: products, STREAMS: max(0.0, alone.forward + alone.backward + alone.update - products)}

    def collectives(self, cluster: Cluster) -> Counter[tuple[str, str]]:
        """Seconds of a step's collectives by kind and level."""
        prices, found = self.prices(cluster), Counter[tuple[str, str]]()
        for one in self.micro.collectives():
            found[one.kind, prices.mesh.axes[one.axis].level] += prices.seconds(one.kind, one.axis, one.nbytes)  # type: ignore[assignment]
        return found


def _is_product(step: Compute) -> bool:
    return step.operator.kind == EXPERTS or bool(RULES[step.operator.kind].products)


def _sum(found: Mapping[str, float], names: Sequence[str]) -> float:
    return math.fsum(found.get(name, 0.0) for name in names)


def _links(predicted: Mapping[tuple[str, str], float], events: Mapping[str, float], backend: str) -> dict[str, _Group]:
    """The collectives of each level: those of the kinds that no other level has, as a profile tells kinds only."""
    folded = FOLDED.get(backend, {})
    measured, levels = Counter[str](), dict[str, set[str]]()
    for name, seconds in events.items():
        measured[folded.get(kind_of(name), kind_of(name))] += seconds  # type: ignore[assignment]
    for kind, level in predicted:
        levels.setdefault(folded.get(kind, kind), set()).add(level)
    found = {}
    for level in dict.fromkeys(level for _, level in predicted):
        kinds = [kind for kind, held in levels.items() if held == {level} and measured[kind] > 0]
        expected = math.fsum(s for (kind, where), s in predicted.items() if where == level and folded.get(kind, kind) in kinds)
        if expected > 0 and ":" not in level:
            what = f"collectives on {level} ({', '.join(sorted(kinds))}), waiting for other ranks included"
            found[level] = _Group(what=what, predicted=expected, measured=_sum(measured, kinds))
    return found


def _told(cluster: Cluster, rows: Sequence[Scaled]) -> Cluster:
    """The cluster with what was scaled saying so."""
    said = {
        row.figure: Source.of(
            f"measured: a profile of a run, in which {row.what} took {seconds_text(row.measured)} where {seconds_text(row.predicted)} were "
            f"predicted; {_text(row.before, row.unit)} before"
        )
        for row in rows
    }
    return replace(cluster, sources={**cluster.sources, **said})


def _row(group: _Group, figure: str, unit: str, before: float, after: float) -> Scaled:
    return Scaled(
        figure=figure, unit=unit, before=before, after=after, what=group.what, predicted=group.predicted, measured=group.measured
    )  # fmt: skip


def _with_arithmetic(cluster: Cluster, group: _Group, families: Mapping[str, str]) -> tuple[Cluster, list[Scaled]]:
    rows = []
    for family, dtype in families.items():
        figure, before = f"device.peak.{family}", cluster.device.flops(dtype)
        rows.append(_row(group, figure, "FLOP/s", before, before * group.factor(figure)))
    peak = {**cluster.device.peak, **{family: row.after for family, row in zip(families, rows, strict=True)}}
    return _told(replace(cluster, device=replace(cluster.device, peak=peak)), rows), rows


def _with_memory(cluster: Cluster, group: _Group, families: Mapping[str, str]) -> tuple[Cluster, list[Scaled]]:
    figure, before = "device.memory_bandwidth", cluster.device.memory_bandwidth
    row = _row(group, figure, "B/s", before, before * group.factor(figure))
    return _told(replace(cluster, device=replace(cluster.device, memory_bandwidth=row.after)), [row]), [row]


def _with_links(cluster: Cluster, group: _Group, name: str) -> tuple[Cluster, list[Scaled]]:
    factor, old = group.factor(f"{name}.bandwidth"), cluster.level(name)
    new = _faster(old, factor)
    rows = [_row(group, f"{name}.bandwidth", "B/s", old.bandwidth, new.bandwidth)]
    rows += [_row(group, f"{name}.latency", "s", old.latency, new.latency)] if old.latency else []
    levels = tuple(new if level is old else level for level in cluster.levels)
    measured = tuple(_curve(entry, factor) if entry.level == name else entry for entry in cluster.measured)
    return _told(replace(cluster, levels=levels, measured=measured), rows), rows


def _faster(level: Level, factor: float) -> Level:
    """The level on which all takes 1 / `factor` of its time."""
    protocols = tuple(
        replace(
            one, latency=one.latency / factor, overhead=one.overhead / factor,
            copy_bandwidth=one.copy_bandwidth and one.copy_bandwidth * factor,
        )
        for one in level.protocols
    )  # fmt: skip
    return replace(
        level, latency=level.latency / factor, bandwidth=level.bandwidth * factor,
        peer_bandwidth=level.peer_bandwidth and level.peer_bandwidth * factor, protocols=protocols,
    )  # fmt: skip


def _curve(entry: Measured, factor: float) -> Measured:
    curve = entry.shared(factor).curve
    return replace(entry, curve=replace(curve, alpha=curve.alpha / factor))


def _text(value: float, unit: str) -> str:
    return seconds_text(value) if unit == "s" else rate_text(value, unit)
