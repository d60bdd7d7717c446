"""The figures of a part of a known transformer, and the part of a run that they depend on.

A part's figures are those of one micro-batch, so they are the same for all runs that differ only in
stages, replicas or the number of layers of a kind: `of_kinds` and `alone` leave these out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from autopar.costmodel.cluster.axis_binding import bind_axes
from autopar.costmodel.cluster.cluster import Cluster
from benchmarks.validating.known.shape import Shape

from .configuration import Configuration


@dataclass(slots=True, kw_only=True)
class PartSeconds:
    """Seconds of one micro-batch through a part of the model, and its bytes on a device.

    - `forward`, `backward`: compute; `weight`: the part of `backward` for weights; `arithmetic`:
      the share of products and attention in both.
    - `recomputed`: forward compute and communication that selective recompute repeats.
    - `moved_forward`, `moved_backward`: exposed collectives, but for `travel_forward`,
      `travel_backward`: of rows to experts and back.
    - `shared_forward`, `shared_backward`: compute of the expert of every token.
    - `parameters`: elements that a device uses; `experts`: those of them that differ between
      expert-parallel ranks.
    - `gathered`: bytes of parameters gathered (ZeRO-3); `gathered_experts`: those of experts.
    - `issued_forward`, `issued_backward`: kernels and collectives that the host issues, which bound
      a part of short kernels.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    recomputed: float = 0.0
    moved_forward: float = 0.0
    moved_backward: float = 0.0
    travel_forward: float = 0.0
    travel_backward: float = 0.0
    shared_forward: float = 0.0
    shared_backward: float = 0.0
    parameters: float = 0.0
    experts: float = 0.0
    gathered: float = 0.0
    gathered_experts: float = 0.0
    issued_forward: float = 0.0
    issued_backward: float = 0.0
    arithmetic: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Levels that the groups of a configuration span.

    `axes`: of `Configuration.axes`, by name. `replicas`: of data and context parallelism together;
    `shards`: of those that share out states, `copies`: of those that hold the same share.
    `tensor`: of tensor parallelism. `experts`: of ranks that split the experts;
    `expert_replicas`: of those with the same ones, `expert_shards`: that share out their states.
    """

    stages: str
    axes: tuple[tuple[str, str], ...]
    replicas: str
    tensor: str
    experts: str
    expert_replicas: str
    shards: str
    copies: str
    expert_shards: str


def places_of(c: Configuration, cluster: Cluster, *, stages: int = 0, pipelines: int = 1) -> Places:
    """Bind the groups of a configuration to levels of the cluster.

    Pipeline stages are outermost, then the axes of a stage. `stages`: those that the cluster holds
    (0: all). `pipelines`: those that share out the replicas; the cluster holds one.
    """
    count = stages or c.pipeline
    # Of several pipelines the cluster holds one, and so a share of the outermost axis.
    sizes = tuple(axis.size for axis in c.axes)
    if pipelines > 1:
        sizes = (sizes[0] // pipelines, *sizes[1:])
    levels = bind_axes(cluster, (count, *sizes))
    together = bind_axes(cluster, (count, c.replicas // pipelines, c.tensor))
    apart = bind_axes(cluster, (count, c.expert_replicas // pipelines, c.expert, c.inner))
    hybrid = _shared_out(c, cluster, count, pipelines)
    assert levels is not None and together is not None and apart is not None, (
        "a cluster has as many devices as it was asked for"
    )
    return Places(
        stages=levels[0],
        axes=tuple(zip((axis.name for axis in c.axes), levels[1:], strict=True)),
        replicas=together[1],
        tensor=together[2],
        experts=apart[2],
        expert_replicas=apart[1],
        shards=hybrid[0] or together[1],
        copies=hybrid[1] or together[1],
        expert_shards=hybrid[2] or apart[1],
    )


def _shared_out(c: Configuration, cluster: Cluster, count: int, pipelines: int) -> tuple[str, ...]:
    """The levels of the ranks that share out, of the copies, and of experts' ranks that share.

    Empty where all replicas share out, as their levels are known then.
    """
    if c.copies == 1 or pipelines > 1:
        return "", "", ""
    dense = bind_axes(cluster, (count, c.copies, c.sharing, c.tensor))
    own = bind_axes(
        cluster, (count, c.expert_replicas // c.expert_sharing, c.expert_sharing, c.expert, c.inner)
    )
    return (dense[2], dense[1], own[2]) if dense and own else ("", "", "")


def of_kinds(shape: Shape) -> Shape:
    """The shape without the fields that only count layers of each kind."""
    return replace(
        shape, layers=1, dense_layers=0, expert_every=1, full_every=0, encoder_layers=0, pattern=""
    )


def alone(c: Configuration) -> Configuration:
    """Return the configuration of one micro-batch, without stages, replicas and later shards."""
    # ZeRO 1 and 2 communicate once a step; only ZeRO 3 does so in the passes of a micro-batch.
    zero = 3 if c.gathers else 0
    data = math.prod(
        axis.size for axis in c.axes if axis.outside == "data" and axis.inside != "replica"
    )
    return replace(
        c,
        pipeline=1,
        interleave=1,
        layout=(),
        schedule="1f1b",
        data=data,
        zero=zero,
        shards=0,
        overlap_experts=False,
        overlap_shared=False,
        global_batch=c.micro_batch * data,
    )
