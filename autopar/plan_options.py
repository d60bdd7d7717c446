"""The arguments of `autopar.plan`, turned into a request to the search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autopar.costmodel import Cluster, default_cluster, load_cluster
from autopar.search import NoAssignment

from .errors import PlanError, UsageError, unknown
from .model import LoadedModel
from .plan import Plan
from .plan_checks import require_consistent
from .planning.candidates import meshes
from .planning.limits import Limits
from .planning.pins import Pins, Restriction, hosted_by, parse_pin, replicated, reuse, together
from .planning.request import Request
from .schemes import scheme_named
from .schemes.pinning import pinned, stage_mesh
from .sharding.analysis import Analysis, analyse
from .sharding.mesh import Mesh
from .sharding.schedule import PLAINLY, Reductions, Types


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """The arguments of `autopar.plan` except the model and `progress`.

    `pins` may be any restriction. `fewer`: whether devices may stay idle. `reductions`: how gradients are reduced.
    """

    devices: int | None = None
    cluster: str | Path | Cluster | None = None
    mode: str = "train"
    master: str | None = None
    reduce: str | None = None
    optimizer: str = "adamw"
    search: str = "dynamic_programming"
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
    load: str | Path | Plan | None = None
    reuse_from: str | Path | Plan | None = None
    discover: bool = False
    replicate_unknown: bool = False
    reductions: Reductions = PLAINLY
    fewer: bool = True

    @property
    def train(self) -> bool:
        """Whether the plan is for training."""
        return is_training(self.mode)

    def request(self, model: LoadedModel, cluster: Cluster) -> tuple[Request, list[str]]:
        """The request for a model on a cluster, and notes for the user."""
        train, limits, mesh, notes = self.train, self._restrictions(model, cluster), self._mesh(cluster), list[str]()
        hosted = None
        if self.reuse_from is not None:
            found, mesh, said, hosted = self._reused(model, cluster)
            limits.append(found)
            notes.append(said)
        request = Request(
            cluster=cluster, train=train, optimizer=self.optimizer if train else "none", method=self.search, memory=self.memory, mesh=mesh,
            limits=together(*limits) if limits else None, stages=self.stages, micro_batches=self.micro_batches, recompute=self.recompute,
            zero=self.zero, offload=self.offload, hosted=hosted if self.offload is None else None, pipeline=self.schedule,
            interleave=self.interleave, fewer=self.fewer,
            uniform=not self.pins and self.reuse_from is None, types=types_of(model, self.master, self.reduce, train=train),
            reductions=self.reductions if train else PLAINLY,
        )  # fmt: skip
        if self.scheme is not None:
            request = pinned(request, scheme_named(self.scheme), analyse(model.graph, train=train))
        return request, notes

    def _mesh(self, cluster: Cluster) -> Mesh | None:
        """The requested mesh of a stage."""
        if self.mesh is None or isinstance(self.mesh, Mesh):
            return self.mesh
        return stage_mesh(cluster, [int(size) for size in self.mesh], self.stages or 1)

    def _restrictions(self, model: LoadedModel, cluster: Cluster) -> list[Restriction]:
        """The restrictions of the pins, and of operators without a rule."""
        found: list[Restriction] = [replicated] if model.graph.replicated else []
        if callable(self.pins) and not isinstance(self.pins, Pins):
            found.append(self.pins)
        elif self.pins:
            wanted = self.pins if isinstance(self.pins, Pins) else Pins(operators=dict(map(parse_pin, self.pins)))
            mesh = self._mesh(cluster)
            found.append(_where_axes_exist(wanted, [mesh] if mesh else meshes(cluster)))
        return found

    def _reused(self, model: LoadedModel, cluster: Cluster) -> tuple[Restriction, Mesh, str, frozenset[str] | None]:
        """The part of a loaded plan that is unchanged in the model, as pins on the plan's mesh, and what has its state on hosts."""
        assert self.reuse_from is not None
        old = self.reuse_from if isinstance(self.reuse_from, Plan) else Plan.load(self.reuse_from)
        require_consistent(old)
        if old.devices != cluster.devices:
            raise PlanError(f"the plan to reuse is for {old.devices} devices, not {cluster.devices}")
        found, kept = reuse(old, analyse(model.graph, train=self.train))
        hosted = hosted_by(old) if kept == len(old.operators) else None
        return found, old.mesh_, f"kept {kept} of the {len(old.operators)} strategies of the loaded plan", hosted


def is_training(mode: str) -> bool:
    """Whether a mode is training; `UsageError` for an unknown one."""
    if mode not in ("train", "infer"):
        raise UsageError(f"mode {mode!r} is none of train, infer")
    return mode == "train"


def choose_cluster(cluster: str | Path | Cluster | None, devices: int | None) -> tuple[Cluster, str]:
    """The cluster to plan for, sized to `devices`, and a sentence that names it."""
    if devices is not None and devices < 1:
        raise UsageError(f"--devices is {devices}; it must be at least 1")
    if cluster is None:
        found, sentence = default_cluster()
    else:
        found = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        sentence = f"cluster {found.name}"
    return (found.sized(devices) if devices is not None else found), sentence


def types_of(model: LoadedModel, master: str | None, reduce: str | None, *, train: bool) -> Types:
    """The requested types of stored parameters and of gradients, or the usual ones for the model's `dtype`."""
    found = Types.of(master, reduce, dtype=model.dtype if train else None)
    found.require(model.graph)
    return found.within(model.graph)


def _where_axes_exist(pins: Pins, candidates: Sequence[Mesh]) -> Restriction:
    """The pins, only on meshes with all axes that they name; `UsageError` for an axis that no candidate has."""
    named = {axis for wanted in pins.operators.values() for axis in wanted}
    offered = dict.fromkeys(axis.name for mesh in candidates for axis in mesh.axes)
    for axis in sorted(named - set(offered)):
        raise UsageError(unknown("mesh axis", axis, offered))

    def restriction(analysis: Analysis, mesh: Mesh) -> Limits:
        if not named <= {axis.name for axis in mesh.axes}:
            raise NoAssignment
        return pins(analysis, mesh)

    return restriction
