"""Seconds of a known configuration's passes, and of what comes once a step.

Once a step come sends, reductions, gathers and the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.collectives import collective_time
from autopar.costmodel.device.elementwise import memory_seconds
from autopar.costmodel.step.covered import SLOWDOWN
from autopar.ir import DTYPE_BYTES
from benchmarks.validating.known.shape import Shape

from .configuration import Configuration
from .exposed_messages import exposed
from .issued_calls import calls_of_overlap
from .part_figures import PartSeconds, Places, places_of
from .part_seconds import parts_of

ENDS = ("embed", "head")
"""Parts that are no layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The devices of a stage.

    `cluster`, `places`: the cluster of these alone, and the levels of its axes. `sends`: the
    cluster with the level to the next stage, in groups of `senders`. `reduces`: the cluster with
    the level to its replicas.
    """

    cluster: Cluster
    places: Places
    sends: Cluster
    reduces: Cluster
    senders: int

    @classmethod
    def of(cls, c: Configuration, cluster: Cluster) -> Site:
        """The site that all stages of a configuration share, on a cluster of as many devices."""
        return cls(
            cluster=cluster,
            places=places_of(c, cluster),
            sends=cluster,
            reduces=cluster,
            senders=c.pipeline,
        )


class Passes:
    """A stage of one configuration; `members`: how often a device has each part."""

    def __init__(self, shape: Shape, c: Configuration, site: Site) -> None:
        self.shape = shape
        self.c = c
        self.site = site
        self.cluster = site.cluster
        self.places = site.places
        self.parts = parts_of(shape, c, site.cluster, site.places)

    def seconds(self, members: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the seconds of the forward pass, of the backward pass, and of weights in it."""
        parts = self.parts
        return (
            sum(n * self.ahead(parts[name]) for name, n in members.items()),
            sum(n * self.back(name) for name, n in members.items()),
            sum(n * parts[name].weight for name, n in members.items()),
        )

    def arithmetic(self, members: Mapping[str, float]) -> float:
        """Seconds of products and attention of a micro-batch, without recompute."""
        return sum(n * self.parts[name].arithmetic for name, n in members.items())

    def stored(self, members: Mapping[str, float]) -> tuple[float, float]:
        """Elements of parameters that a device uses, and of those the ones of experts."""
        parts = self.parts
        return sum(n * parts[name].parameters for name, n in members.items()), sum(
            n * parts[name].experts for name, n in members.items()
        )

    def shared_out(self, kind: str, part: PartSeconds, size: float) -> float:
        """Seconds of a collective of a part's parameters among those that share them (ZeRO-3).

        `size`: bytes of an element. Experts have replicas of their own.
        """
        seconds = 0.0
        for gathered, group, level in (
            (part.gathered - part.gathered_experts, self.c.sharing, self.places.shards),
            (part.gathered_experts, self.c.expert_sharing, self.places.expert_shards),
        ):
            # Even an empty message would have a latency.
            if not gathered:
                continue
            nbytes = gathered * size / DTYPE_BYTES[self.c.dtype]
            sent = self.collective(kind, nbytes, group, level, self.site.reduces)
            seconds += max(sent, nbytes / self.c.habits.gather_rate)
            if kind == "reduce_scatter":
                seconds += self.between_copies(nbytes / group)
        return seconds

    def between_copies(self, nbytes: float) -> float:
        """Seconds of summing a rank's share of the gradients over the copies that hold it."""
        if self.c.copies == 1:
            return 0.0
        return self.collective(
            "all_reduce", nbytes, self.c.copies, self.places.copies, self.site.reduces
        )

    def gather(self, part: PartSeconds) -> float:
        """Seconds of gathering a part's parameters at once (ZeRO-3)."""
        if not part.gathered:
            return 0.0
        size = self.c.habits.gathered_bytes or DTYPE_BYTES[self.c.dtype]
        return self.shared_out("all_gather", part, size)

    def unpacked(self, part: PartSeconds) -> float:
        """Seconds of copying what was gathered from the message to the parameters."""
        size = self.c.habits.gathered_bytes or DTYPE_BYTES[self.c.dtype]
        return self.copied(part, 2 * size) if self.c.habits.unpacks else 0.0

    def copied(self, part: PartSeconds, traffic: float) -> float:
        """Seconds of moving `traffic` bytes for each gathered parameter of a part."""
        elements = part.gathered / DTYPE_BYTES[self.c.dtype]
        return float(memory_seconds(elements * traffic, self.cluster.device))

    def collective(
        self, kind: str, nbytes: float, group: int, level: str, cluster: Cluster | None = None
    ) -> float:
        return float(
            collective_time(kind, nbytes, group, level=level, cluster=cluster or self.cluster)
        )

    def ahead(self, part: PartSeconds) -> float:
        busy = self.run(
            part.forward + part.moved_forward + self.travel(part)[0] + self.unpacked(part),
            self.issued(part)[0],
        )
        return busy + (
            exposed(self.gather(part), busy) if self.c.habits.prefetch else self.gather(part)
        )

    def back(self, name: str) -> float:
        """Return the seconds of a part's backward pass, with what it recomputes.

        Under ZeRO-3 the parameters are gathered again and their gradients scattered, under the
        compute.
        """
        part = self.parts[name]
        busy = self.run(
            part.backward + part.moved_backward + self.travel(part)[1] + self.accumulate(part),
            self.issued(part)[1],
        ) + self.recompute(name)
        if not part.gathered:
            return busy
        moved = self.shared_out("reduce_scatter", part, self.c.habits.reduced_bytes)
        copies = self.copied(part, self.c.habits.packed_bytes)
        if self.c.habits.defers:
            moved /= self.c.micro_batches
            copies /= self.c.micro_batches
        if not (self.c.habits.whole_ends and name in ENDS):
            moved += self.gather(part)
            copies += self.unpacked(part)
        busy += copies
        return busy + (exposed(moved, busy) if self.c.habits.prefetch else moved)

    @property
    def crowding(self) -> float:
        """The slowdown of compute while rows travel.

        A dispatcher with kernels of its own takes multiprocessors away.
        """
        device = self.cluster.device
        units = device.units or (device.kernels.units if device.kernels else 0)
        if self.c.dispatcher != "node" or units <= self.c.dispatcher_sms:
            return SLOWDOWN["nccl"]
        return units / (units - self.c.dispatcher_sms)

    def travel(self, part: PartSeconds, *, hidden: bool = True) -> tuple[float, float]:
        """Return the exposed seconds in which rows travel to experts and back, in both passes.

        `hidden`: whether a pass of another micro-batch is there to cover them.
        """
        both = part.travel_forward + part.travel_backward
        if self.c.overlap_experts and hidden and both:
            # Of two micro-batches the pass forward of one and the pass backward of the other run
            # together, and cover for each other.
            share = exposed(both, part.forward + part.backward, self.crowding) / both
            return part.travel_forward * share, part.travel_backward * share
        if self.c.overlap_shared:
            return (
                exposed(part.travel_forward, part.shared_forward, self.crowding),
                exposed(part.travel_backward, part.shared_backward, self.crowding),
            )
        return part.travel_forward, part.travel_backward

    def uncovered(self, members: Mapping[str, float]) -> float:
        """Seconds that a micro-batch takes longer where no other one covers its rows' ways."""
        return sum(
            n * (sum(self.travel(part, hidden=False)) - sum(self.travel(part)))
            for part, n in ((self.parts[name], n) for name, n in members.items())
        )

    def issued(self, part: PartSeconds) -> tuple[float, float]:
        """Calls that the host issues in both passes of a part."""
        # Layers without experts have nothing to overlap, and keep their usual passes.
        ahead, back = calls_of_overlap(self.c) if part.travel_forward else (0, 0)
        return part.issued_forward + ahead, part.issued_backward + back

    def run(self, seconds: float, issued: float) -> float:
        """Return the seconds of kernels that a host issues.

        The host runs ahead of the device, or else the device waits for it.
        """
        host = issued * self.cluster.device.dispatch
        if self.c.habits.blocking:
            return seconds + host
        return seconds if self.c.habits.compiled else max(seconds, host)

    def accumulate(self, part: PartSeconds) -> float:
        """Return the seconds of adding a micro-batch's gradients to earlier ones.

        They are added in the precision of the reduction.
        """
        alone = self.c.gathers and not (self.c.habits.defers and self.c.micro_batches > 1)
        if alone or self.c.habits.fused_accumulation:
            return 0.0
        habits = self.c.habits
        # The new gradient and the sum are read, the sum is written.
        traffic = (
            DTYPE_BYTES[self.c.dtype] + 2 * habits.gradient_bytes
            if habits.accumulation_bytes is None
            else habits.accumulation_bytes
        )
        return float(memory_seconds(part.parameters * traffic, self.cluster.device))

    def recompute(self, name: str) -> float:
        """Seconds of a part's forward pass that the backward pass repeats."""
        c = self.c
        part = self.parts[name]
        if c.recompute == "none" or (
            name in ENDS and not (c.recompute == "full" and c.habits.recompute_ends)
        ):
            return 0.0
        if c.recompute == "selective":
            return part.recomputed
        return c.habits.recomputed * self.run(
            part.forward + part.moved_forward + part.travel_forward, part.issued_forward
        )

    def send(self) -> float:
        """Return the seconds of one message between stages.

        Where the ranks send shares, the gather on arrival is included.
        """
        c = self.c
        if c.pipeline == 1:
            return 0.0
        nbytes = (
            c.micro_batch
            * self.shape.sequence
            // c.context
            * self.shape.hidden
            * DTYPE_BYTES[c.dtype]
        )
        share = c.tensor if c.habits.scatter_sends or c.sequence_parallel else 1
        seconds = self.collective(
            "send", nbytes / share, self.site.senders, self.places.stages, self.site.sends
        )
        # With sequence parallelism a rank works on its share of the rows, and gathers nothing.
        if share > 1 and not c.sequence_parallel:
            seconds += c.habits.send_gathers * self.collective(
                "all_gather", nbytes, c.tensor, self.places.tensor
            )
        return seconds

    def reduction(
        self, parameters: float, experts: float, forward: float, backward: float
    ) -> float:
        """Return the exposed seconds of reducing gradients once a step, and of gathering shards.

        `forward`, `backward`: seconds of the micro-batch under which they run.
        """
        c = self.c
        if c.replicas == 1 or c.gathers:
            return 0.0
        groups = [(parameters - experts, c.sharing, self.places.shards)]
        if experts:
            groups.append((experts, c.expert_sharing, self.places.expert_shards))
        reduce = sum(self.reduced(*group) for group in groups)
        gather = sum(self.regathered(*group) for group in groups)
        return (exposed(reduce, backward) if c.habits.overlap_gradients else reduce) + (
            exposed(gather, forward) if c.habits.overlap_gather or c.whole_stages else gather
        )

    def reduced(self, parameters: float, group: int, level: str) -> float:
        """Seconds of reducing the gradients of as many parameters in a group."""
        c = self.c
        whole = c.zero == 0 or c.habits.reduce_whole
        kind = "all_reduce" if whole else "reduce_scatter"
        nbytes = parameters * c.habits.reduced_bytes
        seconds = self.collective(kind, nbytes, group, level, self.site.reduces)
        return seconds if c.zero == 0 else seconds + self.between_copies(nbytes / group)

    def regathered(self, parameters: float, group: int, level: str) -> float:
        """Seconds of gathering as many parameters after the update of their shards."""
        if self.c.zero == 0:
            return 0.0
        nbytes = parameters * (self.c.habits.gathered_bytes or DTYPE_BYTES[self.c.dtype])
        return self.collective("all_gather", nbytes, group, level, self.site.reduces)

    def update(self, parameters: float, experts: float) -> float:
        """Return the seconds of the optimizer on a device's shards.

        Experts are sharded over the ranks that have the same ones.
        """
        c = self.c
        owned = (
            parameters
            if not c.zero
            else (parameters - experts) / c.sharing + experts / c.expert_sharing
        )
        return float(memory_seconds(owned * c.habits.update_traffic, self.cluster.device))
