"""The price of a known configuration: a transformer's shape with its parallel degrees, through the ordinary graph and program.

The scheme pins every operator of the graph of one layer, the embedding and the head (`parts`); equal layers are priced once. A stage's
micro-batch takes what its parts take; the pipeline, the reduction of gradients and the optimizer make the step of it:

    step = pipeline(forward + backward of every stage) + exposed reduction of gradients + update
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.errors import UsageError
from autopar.ir import DTYPE_BYTES

from ..cluster import Cluster
from ..collectives import collective_time
from ..device.elementwise import memory_seconds
from ..pipeline import pipeline_seconds
from .configuration import Configuration
from .memory import peak_bytes
from .parts import PartSeconds, parts_of, places_of
from .shape import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Predicted seconds of a step, by part, what the stages take for a micro-batch, and the bytes of the fullest device."""

    step: float
    pipeline: float
    reduction: float
    update: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    memory: float
    fits: bool


def price(shape: Shape, configuration: Configuration, cluster: Cluster) -> Priced:
    """Predict a step of `configuration` on the cluster, cut or grown to its devices.

    Raises `UsageError` where degrees do not divide the shape (it names the operator), or there are more stages than layers.
    """
    chunks = configuration.pipeline * configuration.interleave
    if chunks > shape.layers:
        raise UsageError(f"{chunks} pipeline stages, with their chunks, are more than the {shape.layers} layers of the model")
    return _Step(shape, configuration, cluster.sized(configuration.devices)).priced()


class _Step:
    """A step made of the parts."""

    def __init__(self, shape: Shape, c: Configuration, cluster: Cluster) -> None:
        self.shape, self.c, self.cluster = shape, c, cluster
        self.places = places_of(c, cluster)
        self.parts = parts_of(shape, c, cluster)

    def layers(self) -> list[int]:
        """Layers of each stage; what does not divide is left over in the middle, or (greedy) missing at the end."""
        p, habit, parts = self.c.pipeline, self.c.habits.partition, self.parts
        if habit == "greedy":
            each = -(-self.shape.layers // p)
            return [max(min(each, self.shape.layers - each * stage), 0) for stage in range(p)]
        ends = 0 if habit == "even" or p == 1 else 1 if habit == "items" else round(parts["embed"].parameters / parts["layer"].parameters)
        each, over = divmod(self.shape.layers + 2 * ends, p)
        start = (p - over) // 2
        return [each + (start <= stage < start + over) - ends * (stage in (0, p - 1)) for stage in range(p)]

    def priced(self) -> Priced:
        c, parts = self.c, self.parts
        layer, layers = parts["layer"], self.layers()
        forward, backward, weight, stored = [], [], [], []
        for stage, count in enumerate(layers):
            ends = [(parts["embed"], stage == 0), (parts["head"], stage == c.pipeline - 1)]
            members = [(layer, count), *((part, 1) for part, here in ends if here)]
            forward.append(sum(n * self.ahead(part) for part, n in members))
            repeated = c.habits.recompute_ends and c.recompute == "full"
            backward.append(sum(n * (self.back(part) + (self.again(part) if part is layer or repeated else 0.0)) for part, n in members))
            weight.append(sum(n * part.weight for part, n in members))
            stored.append(sum(n * part.parameters for part, n in members))
        pipeline = pipeline_seconds(
            c.pipeline_schedule, forward, backward, weight, self.send(), c.micro_batches, c.interleave,
            overlap_sends=c.habits.overlap_sends,
        )  # fmt: skip
        fullest = max(range(len(stored)), key=stored.__getitem__)
        largest, experts = stored[fullest], layer.experts * layers[fullest]
        reduction = self.reduction(largest, experts, backward[-1])
        update = self.update(largest)
        memory = peak_bytes(self.shape, c, self.cluster, parts, layers)
        return Priced(
            step=pipeline + reduction + update, pipeline=pipeline, reduction=reduction, update=update, forward=tuple(forward),
            backward=tuple(backward), memory=memory, fits=memory <= self.cluster.device.memory_capacity,
        )  # fmt: skip

    def gather(self, part: PartSeconds) -> float:
        """Seconds of gathering a part's parameters at once (ZeRO-3)."""
        if not part.gathered:
            return 0.0
        seconds = self.collective("all_gather", part.gathered, self.c.replicas, self.places.replicas)
        return max(seconds, part.gathered / self.c.habits.gather_rate)

    def collective(self, kind: str, nbytes: float, group: int, level: str) -> float:
        return float(collective_time(kind, nbytes, group, level=level, cluster=self.cluster))

    def ahead(self, part: PartSeconds) -> float:
        busy = self.run(part.forward + part.moved_forward, part.issued_forward)
        return max(busy, self.gather(part)) if self.c.habits.prefetch else busy + self.gather(part)

    def back(self, part: PartSeconds) -> float:
        """Backward; under ZeRO-3 the parameters are gathered again and their gradients scattered, under the compute."""
        busy = self.run(part.backward + part.moved_backward + self.accumulate(part), part.issued_backward)
        if not part.gathered:
            return busy
        size = part.gathered * self.c.habits.reduced_bytes / DTYPE_BYTES[self.c.dtype]
        scattered = self.collective("reduce_scatter", size, self.c.replicas, self.places.replicas)
        moved = self.gather(part) + max(scattered, size / self.c.habits.gather_rate)
        return max(busy, moved) if self.c.habits.prefetch else busy + moved

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

    def again(self, part: PartSeconds) -> float:
        if self.c.recompute == "none":
            return 0.0
        if self.c.recompute == "selective":
            return part.again
        return self.c.habits.recomputed * self.run(part.forward + part.moved_forward, part.issued_forward)

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

    def reduction(self, parameters: float, experts: float, last_backward: float) -> float:
        """Exposed seconds of reducing the gradients of a device once a step (and of gathering the updated shards)."""
        c = self.c
        if c.replicas == 1 or c.zero == 3:
            return 0.0
        seconds = self.reduced(parameters - experts, c.replicas, self.places.replicas)
        if experts:
            apart, _, context, _ = self.places.axes
            seconds += self.reduced(experts, c.data // c.expert, apart) + self.reduced(experts, c.context, context)
        return max(0.0, seconds - last_backward) if c.habits.overlap_gradients else seconds

    def reduced(self, parameters: float, group: int, level: str) -> float:
        """Seconds of reducing the gradients of as many parameters in a group."""
        c = self.c
        nbytes = parameters * c.habits.reduced_bytes
        if c.zero == 0:
            return self.collective("all_reduce", nbytes, group, level)
        seconds = self.collective("all_reduce" if c.habits.reduce_whole else "reduce_scatter", nbytes, group, level)
        return seconds + self.collective("all_gather", parameters * DTYPE_BYTES[c.dtype], group, level)

    def update(self, parameters: float) -> float:
        shards = self.c.replicas if self.c.zero else 1
        return float(memory_seconds(parameters * self.c.habits.update_traffic / shards, self.cluster.device))
