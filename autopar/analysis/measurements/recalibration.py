"""`recalibrated`: a cluster with figures scaled to the profile of a run.

    R_g / r_g + L_g l = M_g        with the least (log(l) / log(10))^2 + sum of (log(r_g) /
                                   log(1.5))^2
    factor = seconds predicted / seconds measured        for the collectives on a level of links

R_g, L_g: the predicted seconds of a group of operators for arithmetic or traffic, and for launches.
M_g: its measured seconds. r_g: the factor on its rate. l: the factor on the seconds of a launch.

Products, convolutions and attention scale the arithmetic, in the types that they compute in. All
other operators and the update scale the memory's bandwidth. A level's collectives scale both its
bandwidth and its latency, as their sum does not tell one from the other. The rest of the step is
the host's. On CPUs the host also computes the operators, so the rest makes all launches longer. On
GPUs the host runs ahead, so launches stay. Figures without a measurement or a prediction stay, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from autopar.analysis.program.account import has_account
from autopar.analysis.program.step_parts import ARITHMETIC, STREAMS, Stepping, stepping_of
from autopar.costmodel import Cluster, dump
from autopar.costmodel.frameworks import OWN
from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.outputs import write_whole
from autopar.plan import Plan
from autopar.plan_origin import cluster_of_plan
from autopar.sharding.analysis import analyse

from .measured_steps import kind_of
from .rescaling import Group, Scaled, with_arithmetic, with_launch, with_links, with_memory

if TYPE_CHECKING:
    from autopar.runtime.profiling.profile import Profile

FOLDED = {"gloo": {"reduce_scatter": "all_reduce"}}
"""Kinds of collectives that a backend runs, and a profiler shows, as another kind."""
LONGEST = 100.0
"""The largest factor on the seconds of a launch, up or down; the host's seconds differ more than
rates do.
"""
DOUBTED = {"launch": math.log(10.0), "rate": math.log(1.5)}
"""The expected error of a figure in a cluster file, as a logarithm.

Rates are those of the same kind of machine. The host's seconds depend on the processor, the model's
Python and the size of the operators.
"""
TRIED = 2001
"""The number of launch factors to try."""
EXACT = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalibrated:
    """A cluster scaled to a profile.

    `measured`, `before`, `after`: the seconds of a step as measured, as predicted before, and as
    predicted on the scaled cluster.
    """

    cluster: Cluster
    scaled: tuple[Scaled, ...]
    measured: float
    before: float
    after: float

    def save(self, path: str | Path) -> None:
        """Write the cluster file, whole or not at all."""
        write_whole(Path(path), dump(self.cluster))


def recalibrated(profile: Profile, cluster: str | Path | Cluster | None = None) -> Recalibrated:
    """The cluster with figures scaled to a profile of `autopar.profile`.

    `cluster`: by default that of the profiled plan.
    """
    return recalibrate(
        profile.json(), profile.plan, profile.graph, cluster_of_plan(profile.plan, cluster, OWN)
    )


def recalibrate(
    profile: Mapping[str, Any], plan: Plan, graph: Graph, cluster: Cluster
) -> Recalibrated:
    """The scaled cluster, from the profile's plain data and a cluster of the plan's size.

    If the plan has stages, the profile must be of all of them.
    """
    require_alike(plan, cluster)
    profiles: Sequence[Mapping[str, Any]] = profile.get("stages", [profile])
    if plan.stages and len(profiles) == 1:
        raise UsageError(
            "the profile is of one stage of this plan: recalibrate by one of all stages (autopar "
            "run --profile --recalibrate)"
        )
    step = stepping_of(plan, analyse(graph, train=plan.model.mode == "train"))
    kinds, events = (_added(one[name] for one in profiles) for name in ("kinds", "collectives"))
    (whole,) = (part["measured"] for part in profile["parts"] if part["part"] == "step")
    new, rows = _with_operators(cluster, step, kinds)
    for level, group in links_of(step.collectives(cluster), events, cluster.backend).items():
        new, more = with_links(new, group, level)
        rows += more
    if not rows:
        raise UsageError(
            "the profile measured nothing that the plan predicts: no figure of the cluster can be "
            "scaled by it"
        )
    if _has_launches(cluster):
        new, rows = _with_host(new, rows, step, cluster, whole)
    return Recalibrated(
        cluster=new,
        scaled=tuple(rows),
        measured=whole,
        before=step.seconds(cluster),
        after=step.seconds(new),
    )


def require_alike(plan: Plan, cluster: Cluster) -> None:
    """Refuse clusters and plans that one profile cannot represent.

    These are clusters of several kinds of devices, and stages on unlike meshes.
    """
    if cluster.joined:
        raise UsageError(
            f"a profile is of one kind of the devices of {cluster.name!r}: recalibrate each pool "
            "by itself"
        )
    if not has_account(plan):
        raise UsageError(
            "the stages of this plan are on meshes of different shape: recalibrate by a plan whose "
            "stages are alike"
        )


def _added(parts: Any) -> Counter[str]:
    total = Counter[str]()
    for one in parts:
        total.update(one)
    return total


# --- operators: rates, and launches ---


def _has_launches(cluster: Cluster) -> bool:
    return cluster.backend == "gloo" and cluster.device.launch > 0


def _with_operators(
    cluster: Cluster, step: Stepping, kinds: Mapping[str, float]
) -> tuple[Cluster, list[Scaled]]:
    """The cluster on which each group of operators takes its measured seconds."""
    # Without launches a step has only the seconds that rates change; the difference is the
    # launches'.
    idle = (
        replace(cluster, device=replace(cluster.device, launch=0.0))
        if _has_launches(cluster)
        else cluster
    )
    rates = step.computed(idle)
    all_of = step.computed(cluster)
    groups = {}
    for names in (ARITHMETIC, STREAMS):
        held = [name for name in names if kinds.get(name, 0.0) > 0]
        measured = math.fsum(kinds[name] for name in held)
        if all_of[names] > 0 and measured > 0:
            launches = all_of[names] - rates[names]
            groups[names] = Group(
                what=", ".join(held), predicted=all_of[names], measured=measured, launches=launches
            )
    length = _least_change(list(groups.values())) if idle is not cluster else 1.0
    new = cluster
    rows = list[Scaled]()
    for names, group in groups.items():
        scaled = replace(group, length=length)
        new, more = (
            with_arithmetic(new, scaled, step.families)
            if names is ARITHMETIC
            else with_memory(new, scaled)
        )
        rows += more
    if length != 1.0:
        whole = Group(
            what="operators",
            predicted=sum(g.launches for g in groups.values()),
            measured=0.0,
            launches=0.0,
        )
        new, more = with_launch(
            new, replace(whole, measured=whole.predicted * length), cluster.device.launch * length
        )
        rows += more
    return new, rows


def _least_change(groups: Sequence[Group]) -> float:
    """The factor on launches with the least changes of launches and rates."""
    # A factor on launches fixes the rate of every group, so this is a search over one number.
    lengths = np.exp(np.linspace(-math.log(LONGEST), math.log(LONGEST), TRIED))
    change = (np.log(lengths) / DOUBTED["launch"]) ** 2
    for group in groups:
        left = group.measured - lengths * group.launches
        with np.errstate(invalid="ignore", divide="ignore"):
            rate = (np.log((group.predicted - group.launches) / left) / DOUBTED["rate"]) ** 2
        change = change + np.where(left > EXACT * group.measured, rate, np.inf)
    best = int(np.argmin(change))
    return float(lengths[best]) if math.isfinite(change[best]) else 1.0


def _with_host(
    cluster: Cluster, rows: list[Scaled], step: Stepping, before: Cluster, measured: float
) -> tuple[Cluster, list[Scaled]]:
    """The cluster with longer launches, if the step would otherwise be shorter than measured."""

    def sized(length: float) -> Cluster:
        return replace(
            cluster, device=replace(cluster.device, launch=before.device.launch * length)
        )

    low = cluster.device.launch / before.device.launch
    high = LONGEST
    if step.seconds(cluster) >= measured or low >= high:
        return cluster, rows
    # The step grows with its launches, so bisection finds the factor.
    if step.seconds(sized(high)) > measured:
        while high - low > EXACT * high:
            middle = (low + high) / 2
            low, high = (middle, high) if step.seconds(sized(middle)) < measured else (low, middle)
    others = [row for row in rows if row.figure != "device.launch"]
    launches = sum(step.computed(before).values()) - sum(
        step.computed(replace(before, device=replace(before.device, launch=0.0))).values()
    )
    what = "operators and all that Python does between them"
    group = Group(what=what, predicted=launches, measured=launches * high, launches=0.0)
    new, more = with_launch(
        replace(cluster, device=replace(cluster.device, launch=before.device.launch)),
        group,
        sized(high).device.launch,
    )
    return new, others + more


# --- links ---


def links_of(
    predicted: Mapping[tuple[str, str], float], events: Mapping[str, float], backend: str
) -> dict[str, Group]:
    """The collectives of each level of links.

    A kind that several levels have is left out, because a profile tells kinds only.
    """
    folded = FOLDED.get(backend, {})
    measured = Counter[str]()
    levels = dict[str, set[str]]()
    for name, seconds in events.items():
        measured[folded.get(kind_of(name), kind_of(name))] += seconds  # type: ignore[assignment]
    for kind, level in predicted:
        levels.setdefault(folded.get(kind, kind), set()).add(level)
    groups = {}
    for level in dict.fromkeys(level for _, level in predicted):
        kinds = [kind for kind, held in levels.items() if held == {level} and measured[kind] > 0]
        expected = math.fsum(
            s
            for (kind, where), s in predicted.items()
            if where == level and folded.get(kind, kind) in kinds
        )
        if expected > 0 and ":" not in level:
            what = (
                f"collectives on {level} ({', '.join(sorted(kinds))}), waiting for other ranks "
                "included"
            )
            groups[level] = Group(
                what=what, predicted=expected, measured=math.fsum(measured[kind] for kind in kinds)
            )
    return groups
