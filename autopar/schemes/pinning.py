"""A scheme as pins of a `Request`: limits on the operators, the mesh, ZeRO, and the pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autopar.costmodel import Cluster, bind_axes
from autopar.errors import UsageError
from autopar.planning.model.pins import together
from autopar.planning.model.request import Request
from autopar.planning.model.restrictions import Limits
from autopar.planning.space.candidates import meshes, name_axes
from autopar.search import NoAssignment
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Mesh
from autopar.sharding.micro_batches import split_batch

from .axis import AxisScheme, axis_limits, offered
from .known import Scheme

MOST = 0.95
"""The share of the parameters' bytes that is to lie in shards of an axis."""


def pinned(request: Request, scheme: Scheme, analysis: Analysis) -> Request:
    """The request with the scheme's limits added; limits of the request stay.

    Raises `UsageError` with the reason if the scheme is impossible.
    """
    devices = request.cluster.devices
    stages = request.stages or scheme.stages_for(devices, analysis)
    if stages and devices % stages:
        raise UsageError(f"{devices} devices do not make {stages} equal stages")
    zero = request.zero if request.zero is not None else scheme.zero
    if zero is not None and request.zero is not None:
        scheme = scheme.with_storage(zero)
    if request.mesh is None:
        scheme = storable(scheme, analysis)
    mesh = request.mesh or _wanted(scheme, request.cluster, stages or 1)
    tried = [mesh] if mesh is not None else meshes(request.cluster, stages or 1)
    count = request.micro_batches or 1
    part = split_batch(analysis, count) if count > 1 else analysis
    reasons = [scheme.lacks(part, one) for one in tried]
    if reasons and all(reasons):
        raise UsageError(str(reasons[0]))
    possible = Possible(scheme=scheme, analysis=analysis)
    limits = together(request.limits, possible) if request.limits else possible
    return replace(
        request,
        limits=limits,
        mesh=mesh,
        stages=stages or 1,
        zero=zero,
        schedule=request.schedule or scheme.pipeline,
        fewer=False,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Possible:
    """A scheme's limits on meshes on which the model, and every part of it, can have the scheme."""

    scheme: Scheme
    # The graph's own, so that the scheme alone tells two of them apart.
    analysis: Analysis = field(repr=False)
    whole: dict[Mesh, dict[str, bool] | None] = field(default_factory=dict, repr=False)

    def __call__(self, analysis: Analysis, mesh: Mesh) -> Limits:
        """Raise `NoAssignment` if a part of the batch lacks a split that the whole batch offers."""
        by_axis = self.scheme.by_axis(mesh)
        if mesh not in self.whole:
            lacks = self.scheme.lacks(self.analysis, mesh)
            of_whole = self.scheme.profiles(self.analysis)
            self.whole[mesh] = None if lacks else offered(by_axis, self.analysis, of_whole, mesh)
        whole = self.whole[mesh]
        if whole is None:
            raise NoAssignment
        profiles = self.scheme.profiles(analysis)
        here = offered(by_axis, analysis, profiles, mesh)
        if any(able and not here.get(name, True) for name, able in whole.items()):
            raise NoAssignment
        return axis_limits(by_axis, analysis, profiles, mesh)


def storable(scheme: Scheme, analysis: Analysis) -> Scheme:
    """The scheme with parameters split over as many devices of an axis as they divide over.

    The rest of the axis replicates the shards: of 48 devices, 3 x 16 where dims are powers of two.
    """
    sizes: list[int] = []
    axes: list[AxisScheme] = []
    for size, axis in zip(scheme.sizes, scheme.axes, strict=bool(scheme.sizes)):
        shards = _shards(size, analysis) if axis.storage == "split" else size
        if 1 < shards < size:
            sizes.append(size // shards)
            axes.append(replace(axis, storage="whole"))
        sizes.append(size if shards == 1 else shards)
        axes.append(axis)
    return replace(scheme, sizes=tuple(sizes), axes=tuple(axes)) if sizes else scheme


def _shards(devices: int, analysis: Analysis) -> int:
    """The most devices, of a divisor of these, over which most bytes of parameters divide."""
    nbytes: Counter[tuple[int, ...]] = Counter()
    for tensor in analysis.graph.parameters:
        nbytes[tensor.shape] += tensor.bytes
    for shards in (n for n in range(devices, 1, -1) if devices % n == 0):
        divided = sum(of for shape, of in nbytes.items() if any(d % shards == 0 for d in shape))
        if divided >= MOST * nbytes.total():
            return shards
    return 1


def _wanted(scheme: Scheme, cluster: Cluster, stages: int) -> Mesh | None:
    """The mesh of a stage that the scheme wants."""
    sizes = scheme.mesh_sizes(cluster.devices // stages)
    return None if sizes is None else stage_mesh(cluster, sizes, stages)


def stage_mesh(cluster: Cluster, sizes: Sequence[int], stages: int = 1) -> Mesh:
    """The mesh of these sizes for one of so many stages.

    The stages are the outermost axis of all.
    """
    levels = bind_axes(cluster, (stages, *sizes))
    if levels is None:
        held = " x ".join(map(str, sizes)) or "1"
        where = f"{stages} stages of " if stages > 1 else ""
        raise UsageError(f"{where}a mesh of {held} does not have {cluster.devices} devices")
    return name_axes(cluster, tuple(sizes), levels[1:])
