"""The arguments of `autopar.plan`, turned into a request to the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.costmodel import Cluster, default_cluster, load_cluster
from autopar.costmodel.frameworks import OWN, Framework, framework_of, target_named
from autopar.errors import PlanError, UsageError, unknown
from autopar.ir import Graph
from autopar.ir.dtype import HALVES
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.plan_checks import require_consistent
from autopar.planning.model.pins import (
    Dispatched,
    Pins,
    Restriction,
    hosted_by,
    parse_pin,
    replicated,
    reuse,
    together,
)
from autopar.planning.model.request import Request
from autopar.planning.model.restrictions import Limits
from autopar.planning.space.candidates import meshes
from autopar.schemes import scheme_named
from autopar.schemes.pinning import pinned, stage_mesh
from autopar.search import NoAssignment
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layer_numbers import by_layer
from autopar.sharding.mesh import Mesh
from autopar.sharding.rules.experts import has_experts
from autopar.sharding.schedule import PLAINLY, Reductions, Types

from .targets import within


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The arguments of `autopar.plan` except the model and `progress`.

    `pins` may be any restriction. `fewer`: whether devices may stay idle. `reductions`: how
    gradients are reduced. `cuts`: where stages may begin, as of `Request`.
    """

    devices: int | None = None
    cluster: str | Path | Cluster | None = None
    target: str | None = None
    mode: str = "train"
    master: str | None = None
    reduce: str | None = None
    optimizer: str = "adamw"
    search: str = "dynamic_programming"
    gap: float | None = None
    seconds: float | None = None
    routing: str | Path = "even"
    memory: float | None = None
    pins: Sequence[str] | Pins | Restriction = ()
    scheme: str | None = None
    mesh: Mesh | Sequence[int] | None = None
    stages: int | None = None
    micro_batches: int | None = None
    recompute: str | None = None
    zero: int | None = None
    offload: str | None = None
    schedule: str | None = None
    interleave: int | None = None
    overlap_experts: str | None = None
    load: str | Path | Plan | None = None
    reuse_from: str | Path | Plan | None = None
    discover: bool = False
    replicate_unknown: bool = False
    reductions: Reductions = PLAINLY
    fewer: bool = True
    cuts: tuple[range, ...] | None = None

    def chosen_cluster(self) -> tuple[Cluster, str]:
        """The cluster to plan for, with the framework that runs the plan, and its sentence.

        A `Cluster` that has a framework of others keeps it.
        """
        cluster, sentence = choose_cluster(self.cluster, self.devices)
        if self.target is not None and cluster.framework.name == OWN:
            cluster = cluster.run_by(framework_of(self.target, self.zero))
        return cluster, sentence

    @property
    def train(self) -> bool:
        """Whether the plan is for training."""
        return is_training(self.mode)

    def requests(self, model: LoadedModel, cluster: Cluster) -> tuple[list[Request], list[str]]:
        """The requests for a model on a cluster, for each part of a target's, and notes."""
        request, notes = self.request(model, cluster)
        if self.target is None:
            return [request], notes
        name, _ = target_named(self.target)
        if name == OWN:
            return [request], notes
        return within(request, name, analyse(model.graph, train=self.train)), notes

    def request(self, model: LoadedModel, cluster: Cluster) -> tuple[Request, list[str]]:
        """The request for a model on a cluster, and notes for the user."""
        train = self.train
        limits = self._restrictions(model, cluster)
        mesh = self._mesh(cluster)
        notes = list[str]()
        hosted = None
        if self.reuse_from is not None:
            matching, mesh, said, hosted = self._reused(model, cluster)
            limits.append(matching)
            notes.append(said)
        request = Request(
            cluster=cluster,
            target=self.target or OWN,
            train=train,
            optimizer=self.optimizer if train else "none",
            search=self.search,
            memory=self.memory,
            mesh=mesh,
            limits=together(*limits) if limits else None,
            stages=self.stages,
            micro_batches=self.micro_batches,
            recompute=self.recompute,
            zero=self.zero,
            offload=self.offload,
            hosted=hosted if self.offload is None else None,
            schedule=self.schedule,
            interleave=self.interleave,
            overlap_experts=None if self.overlap_experts is None else self.overlap_experts == "on",
            gap=self.gap,
            seconds=self.seconds,
            fewer=self.fewer,
            cuts=self.cuts,
            uniform=not self.pins and self.reuse_from is None,
            types=types_of(model, self.master, self.reduce, cluster.framework, train=train),
            reductions=self._reductions(model, cluster) if train else PLAINLY,
        )
        if self.scheme is not None:
            request = pinned(request, scheme_named(self.scheme), analyse(model.graph, train=train))
        return request, notes

    def _reductions(self, model: LoadedModel, cluster: Cluster) -> Reductions:
        """The reductions that were asked for, else those of layers where the framework has them."""
        if self.reductions != PLAINLY or not cluster.framework.habits.by_layer:
            return self.reductions
        layers = by_layer(tensor.name for tensor in model.graph.parameters)
        return replace(self.reductions, fused=layers)

    def _mesh(self, cluster: Cluster) -> Mesh | None:
        """The requested mesh of a stage."""
        if self.mesh is None or isinstance(self.mesh, Mesh):
            return self.mesh
        return stage_mesh(cluster, [int(size) for size in self.mesh], self.stages or 1)

    def _restrictions(self, model: LoadedModel, cluster: Cluster) -> list[Restriction]:
        """The restrictions of the pins, and of operators without a rule."""
        restrictions: list[Restriction] = [replicated] if model.graph.replicated else []
        dispatcher = cluster.framework.kernels.dispatcher
        if dispatcher and any(has_experts(op.kind) for op in model.graph.operators):
            restrictions.append(Dispatched(dispatcher=dispatcher))
        if callable(self.pins) and not isinstance(self.pins, Pins):
            restrictions.append(self.pins)
        elif self.pins:
            wanted = (
                self.pins
                if isinstance(self.pins, Pins)
                else Pins(operators=dict(map(parse_pin, self.pins)))
            )
            mesh = self._mesh(cluster)
            restrictions.append(_where_axes_exist(wanted, [mesh] if mesh else meshes(cluster)))
        return restrictions

    def _reused(
        self, model: LoadedModel, cluster: Cluster
    ) -> tuple[Restriction, Mesh, str, frozenset[str] | None]:
        """The part of a loaded plan that matches the model, as pins on the plan's mesh.

        Also a sentence for the user, and the parameters with their state on hosts.
        """
        assert self.reuse_from is not None
        old = Plan.of(self.reuse_from)
        require_consistent(old)
        if old.devices != cluster.devices:
            raise PlanError(
                f"the plan to reuse is for {old.devices} devices, not {cluster.devices}"
            )
        matching, reused = reuse(old, analyse(model.graph, train=self.train))
        hosted = hosted_by(old) if reused == len(old.operators) else None
        return (
            matching,
            old.mesh_,
            f"kept {reused} of the {len(old.operators)} strategies of the loaded plan",
            hosted,
        )


def requests_beside(plan: Plan, graph: Graph, cluster: Cluster, **asked: Any) -> list[Request]:
    """The requests for other plans of a plan's model: for its target, with its optimizer and types.

    `asked`: further options. Raises `UsageError` as they do.
    """
    named = plan.model
    options = PlanOptions(target=plan.target, mode=named.mode, optimizer=named.optimizer, **asked)
    model = LoadedModel(graph=graph, source=graph, dtype=named.dtype)
    requests, _ = options.requests(model, cluster)
    return [replace(request, types=plan.schedule.types) for request in requests]


def is_training(mode: str) -> bool:
    """Whether a mode is training; `UsageError` for an unknown one."""
    if mode not in ("train", "infer"):
        raise UsageError(f"mode {mode!r} is none of train, infer")
    return mode == "train"


def choose_cluster(
    cluster: str | Path | Cluster | None, devices: int | None
) -> tuple[Cluster, str]:
    """The cluster to plan for, sized to `devices`, and a sentence that names it."""
    if devices is not None and devices < 1:
        raise UsageError(f"--devices is {devices}; it must be at least 1")
    if cluster is None:
        chosen, sentence = default_cluster()
    else:
        chosen = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        sentence = f"cluster {chosen.name}"
    return (chosen.sized(devices) if devices is not None else chosen), sentence


def types_of(
    model: LoadedModel, master: str | None, reduce: str | None, framework: Framework, *, train: bool
) -> Types:
    """The types of stored parameters and of gradients.

    They are the requested ones, or the usual ones of the framework for the model's `dtype`.
    """
    if reduce is None and framework.narrow_gradients and model.dtype in HALVES:
        reduce = model.dtype
    types = Types.of(master, reduce, dtype=model.dtype if train else None)
    types.require(model.graph)
    return types.within(model.graph)


def _where_axes_exist(pins: Pins, candidates: Sequence[Mesh]) -> Restriction:
    """The pins as a restriction, on meshes with all axes that they name.

    Raises `UsageError` for an axis that no candidate has.
    """
    named = {axis for wanted in pins.operators.values() for axis in wanted}
    offered = dict.fromkeys(axis.name for mesh in candidates for axis in mesh.axes)
    for axis in sorted(named - set(offered)):
        raise UsageError(unknown("mesh axis", axis, offered))
    return _OnAxes(pins=pins, named=frozenset(named))


@dataclass(frozen=True, slots=True, kw_only=True)
class _OnAxes:
    """Pins on meshes that have all of the `named` axes."""

    pins: Pins
    named: frozenset[str]

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        if not self.named <= {axis.name for axis in mesh.axes}:
            raise NoAssignment
        return self.pins(analysis, mesh)
