"""The figures of a part of a known transformer, and the part of a run that they depend on.

A part's figures are those of one micro-batch, so they are the same for all runs that differ only in
stages, replicas or the number of layers of a kind: `of_kinds` and `alone` leave these out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.costmodel.cluster.axis_binding import bind_axes
from autopar.costmodel.cluster.cluster import Cluster

from .configuration import Configuration
from .shape import Shape


@dataclass(slots=True, kw_only=True)
class PartSeconds:
    """Seconds of one micro-batch through a part of the model, and its bytes on a device.

    `forward`, `backward`: compute. `weight`: the part of `backward` for weights. `recomputed`:
    forward compute and communication that selective recompute repeats. `moved_forward`,
    `moved_backward`: exposed collectives. `parameters`: elements that a device uses; `experts`:
    those of them that differ between expert-parallel ranks. `gathered`: bytes of parameters
    gathered (ZeRO-3). `issued_forward`, `issued_backward`: kernels and collectives that the host
    issues, which bound a part of short kernels. `arithmetic`: the share of products and attention
    in `forward` and `backward`.
    """

    forward: float = 0.0
    backward: float = 0.0
    weight: float = 0.0
    recomputed: float = 0.0
    moved_forward: float = 0.0
    moved_backward: float = 0.0
    parameters: float = 0.0
    experts: float = 0.0
    gathered: float = 0.0
    issued_forward: float = 0.0
    issued_backward: float = 0.0
    arithmetic: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Levels that the axes of a configuration span.

    `axes`: of data, expert, context and tensor parallelism. `replicas`: of the first three
    together.
    """

    stages: str
    axes: tuple[str, ...]
    replicas: str


def places_of(c: Configuration, cluster: Cluster) -> Places:
    """Bind the axes of a configuration to levels of the cluster.

    Pipeline stages are outermost, then data, expert and context parallelism; tensor parallelism is
    over neighbours.
    """
    # The last axis lies on the nearest devices: tensor parallelism communicates most.
    levels = bind_axes(
        cluster, (c.pipeline, c.data // c.expert_data, c.expert_data, c.context, c.tensor)
    )
    together = bind_axes(cluster, (c.pipeline, c.replicas, c.tensor))
    assert levels is not None and together is not None
    return Places(stages=levels[0], axes=levels[1:], replicas=together[1])


def of_kinds(shape: Shape) -> Shape:
    """The shape without the fields that only count layers of each kind."""
    return replace(
        shape, layers=1, dense_layers=0, expert_every=1, full_every=0, encoder_layers=0, pattern=""
    )


def alone(c: Configuration) -> Configuration:
    """Return the configuration of one micro-batch, without stages, replicas and later shards."""
    # ZeRO 1 and 2 communicate once a step; only ZeRO 3 does so in the passes of a micro-batch.
    zero = 3 if c.zero == 3 else 0
    data = c.expert_data
    return replace(
        c,
        pipeline=1,
        interleave=1,
        schedule="1f1b",
        data=data,
        zero=zero,
        global_batch=c.micro_batch * data,
    )
