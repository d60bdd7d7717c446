"""The price of a known configuration: a transformer's shape with its parallel degrees, through the ordinary graph and program.

The scheme pins every operator of the graph of one layer, the embedding and the head (`parts`); equal layers are priced once. A stage's
micro-batch takes what its parts take; the pipeline, the reduction of gradients and the optimizer make the step of it:

    step = pipeline(forward + backward of every stage) + exposed reduction of gradients + update
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.ir import DTYPE_BYTES

from ..cluster.model import Cluster
from ..collectives import collective_time
from ..device.elementwise import memory_seconds
from ..memory.occupancy import occupied
from ..step.pipeline import pipeline_seconds
from .configuration import Configuration
from .hiding import exposed
from .memory import peak_bytes
from .parts import PartSeconds, parts_of, places_of
from .shape import Shape
from .stages import dealt


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Predicted seconds of a step, by part, what the stages take for a micro-batch, and the bytes of the fullest device.

    `allocated`: of a device of each stage, at the peak of what its tensors take; `memory`: with what the allocator, the context and the
    libraries take besides. `arithmetic`: of the busiest stage, seconds of products and attention alone, without recompute and bubble.
    """

    step: float
    pipeline: float
    reduction: float
    update: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    arithmetic: float
    allocated: tuple[float, ...]
    memory: float
    fits: bool


def price(shape: Shape, configuration: Configuration, cluster: Cluster) -> Priced:
    """Predict a step of `configuration` on the cluster, cut or grown to its devices.

    Raises `UsageError` where degrees do not divide the shape (it names the operator), or there are more stages than layers.
    """
    chunks = configuration.pipeline * configuration.interleave
    layers = len(shape.kinds())
    if chunks > layers + 2 * (configuration.habits.partition == "items"):
        raise UsageError(f"{chunks} pipeline stages, with their chunks, are more than the {layers} layers of the model")
    return _Step(shape, configuration, cluster.sized(configuration.devices)).priced()


class _Step:
    """A step made of the parts."""

    def __init__(self, shape: Shape, c: Configuration, cluster: Cluster) -> None:
        self.shape, self.c, self.cluster = shape, c, cluster
        self.places = places_of(c, cluster)
        self.parts = parts_of(shape, c, cluster)
        self.stages = [self._members(i, found) for i, found in enumerate(dealt(shape, c, {n: p.parameters for n, p in self.parts.items()}))]

    def _members(self, stage: int, layers: Counter[str]) -> dict[str, float]:
        """How often a stage has each part, in the order of the model."""
        last = stage == self.c.pipeline - 1
        found = {"embed": float(stage == 0), **layers, "mtp": float(last), "head": float(last)}
        return {name: float(count) for name, count in found.items() if name in self.parts}

    def priced(self) -> Priced:
        c, parts = self.c, self.parts
        forward, backward, weight = [], [], []
        for members in self.stages:
            forward.append(sum(n * self.ahead(parts[name]) for name, n in members.items()))
            backward.append(sum(n * (self.back(parts[name]) + self.again(name)) for name, n in members.items()))
            weight.append(sum(n * parts[name].weight for name, n in members.items()))
        pipeline = pipeline_seconds(
            c.pipeline_schedule, forward, backward, weight, self.send(), c.micro_batches, c.interleave,
            overlap_sends=c.habits.overlap_sends,
        )  # fmt: skip
        arithmetic = [sum(n * parts[name].arithmetic for name, n in members.items()) for members in self.stages]
        stored = [sum(n * parts[name].parameters for name, n in members.items()) for members in self.stages]
        fullest = max(range(len(stored)), key=stored.__getitem__)
        experts = sum(n * parts[name].experts for name, n in self.stages[fullest].items())
        reduction = self.reduction(stored[fullest], experts, forward[fullest], backward[-1])
        update = self.update(stored[fullest], experts)
        allocated = peak_bytes(self.shape, c, self.cluster, parts, self.stages)
        peak = max(allocated, key=lambda m: occupied(m, self.cluster.device))
        memory = occupied(peak, self.cluster.device) + c.habits.workspace
        return Priced(
            step=pipeline + reduction + update, pipeline=pipeline, reduction=reduction, update=update, forward=tuple(forward),
            backward=tuple(backward), arithmetic=c.micro_batches * max(arithmetic),
            allocated=tuple(m.total + c.habits.workspace for m in allocated), memory=memory,
            fits=memory <= self.cluster.device.memory_capacity,
        )  # fmt: skip

    def gather(self, part: PartSeconds) -> float:
        """Seconds of gathering a part's parameters at once (ZeRO-3)."""
        if not part.gathered:
            return 0.0
        nbytes = part.gathered * (self.c.habits.gathered_bytes or DTYPE_BYTES[self.c.dtype]) / DTYPE_BYTES[self.c.dtype]
        seconds = self.collective("all_gather", nbytes, self.c.replicas, self.places.replicas)
        return max(seconds, nbytes / self.c.habits.gather_rate)

    def collective(self, kind: str, nbytes: float, group: int, level: str) -> float:
        return float(collective_time(kind, nbytes, group, level=level, cluster=self.cluster))

    def ahead(self, part: PartSeconds) -> float:
        busy = self.run(part.forward + part.moved_forward, part.issued_forward)
        return busy + (exposed(self.gather(part), busy) if self.c.habits.prefetch else self.gather(part))

    def back(self, part: PartSeconds) -> float:
        """Backward; under ZeRO-3 the parameters are gathered again and their gradients scattered, under the compute."""
        busy = self.run(part.backward + part.moved_backward + self.accumulate(part), part.issued_backward)
        if not part.gathered:
            return busy
        size = part.gathered * self.c.habits.reduced_bytes / DTYPE_BYTES[self.c.dtype]
        scattered = self.collective("reduce_scatter", size, self.c.replicas, self.places.replicas)
        moved = self.gather(part) + max(scattered, size / self.c.habits.gather_rate)
        return busy + (exposed(moved, busy) if self.c.habits.prefetch else moved)

    def run(self, seconds: float, issued: float) -> float:
        """Seconds of kernels that a host issues: it runs ahead of the device, or else the device waits for it."""
        host = issued * self.cluster.device.dispatch
        if self.c.habits.blocking:
            return seconds + host
        return seconds if self.c.habits.compiled else max(seconds, host)

    def accumulate(self, part: PartSeconds) -> float:
        """Seconds of adding the gradients of a micro-batch to those of the ones before it, in the precision of the reduction."""
        if self.c.zero == 3 or self.c.habits.fused_accumulation:
            return 0.0
        habits = self.c.habits
        traffic = DTYPE_BYTES[self.c.dtype] + 2 * habits.gradient_bytes if habits.accumulation_bytes is None else habits.accumulation_bytes
        return float(memory_seconds(part.parameters * traffic, self.cluster.device))

    def again(self, name: str) -> float:
        """Seconds of a part's forward pass that the backward pass repeats."""
        c, part = self.c, self.parts[name]
        if c.recompute == "none" or (name in ("embed", "head") and not (c.recompute == "full" and c.habits.recompute_ends)):
            return 0.0
        if c.recompute == "selective":
            return part.again
        return c.habits.recomputed * self.run(part.forward + part.moved_forward, part.issued_forward)

    def send(self) -> float:
        """Seconds of one message between stages, and the gather on arrival where the ranks send shares."""
        c = self.c
        if c.pipeline == 1:
            return 0.0
        nbytes = c.micro_batch * self.shape.sequence // c.context * self.shape.hidden * DTYPE_BYTES[c.dtype]
        share = c.tensor if c.habits.scatter_sends or c.sequence_parallel else 1
        seconds = self.collective("send", nbytes / share, c.pipeline, self.places.stages)
        if share > 1 and not c.sequence_parallel:
            seconds += c.habits.send_gathers * self.collective("all_gather", nbytes, c.tensor, self.places.axes[-1])
        return seconds

    def reduction(self, parameters: float, experts: float, forward: float, backward: float) -> float:
        """Exposed seconds of reducing the gradients of a device once a step, and of gathering the updated shards; `forward` and `backward`:
        of the micro-batch under which they run."""
        c = self.c
        if c.replicas == 1 or c.zero == 3:
            return 0.0
        groups = [(parameters - experts, c.replicas, self.places.replicas)]
        if experts:
            apart, _, context, _ = self.places.axes
            groups += [(experts, c.data // c.expert_data, apart), (experts, c.context, context)]
        reduce = sum(self.reduced(*group) for group in groups)
        gather = sum(self.regathered(*group) for group in groups)
        return (exposed(reduce, backward) if c.habits.overlap_gradients else reduce) + (
            exposed(gather, forward) if c.habits.overlap_gather else gather
        )

    def reduced(self, parameters: float, group: int, level: str) -> float:
        """Seconds of reducing the gradients of as many parameters in a group."""
        c = self.c
        whole = c.zero == 0 or c.habits.reduce_whole
        return self.collective("all_reduce" if whole else "reduce_scatter", parameters * c.habits.reduced_bytes, group, level)

    def regathered(self, parameters: float, group: int, level: str) -> float:
        """Seconds of gathering as many parameters after the update of their shards."""
        if self.c.zero == 0:
            return 0.0
        return self.collective("all_gather", parameters * (self.c.habits.gathered_bytes or DTYPE_BYTES[self.c.dtype]), group, level)

    def update(self, parameters: float, experts: float) -> float:
        """Seconds of the optimizer on a device's shards; experts are sharded over the ranks that have the same ones."""
        c = self.c
        owned = parameters if not c.zero else (parameters - experts) / c.replicas + experts / max(c.replicas // c.expert_data, 1)
        return float(memory_seconds(owned * c.habits.update_traffic, self.cluster.device))
