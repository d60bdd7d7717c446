"""A device's copies, casts and additions of parameters and gradients; no communication hides them.

    gather        reads and writes the shard into a message, and the gathered value out of it; the
                  second copy is not
                  needed if the parameter fills a message alone and is split along its first dim
    reduction     reads and writes the gradient into a message, twice if it is split along another
                  dim than the first
    cast          of a micro-batch's gradient to the type in which it travels, and of the sum to the
                  stored type
    addition      three passes over the gradient, for every micro-batch except the first

A gather takes one group of axes after the other, the innermost first: axes on which the parameter
is stored alike, and used alike, are one group. The timeline plays the same
(`costmodel/step/unit_player.py`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.device.device import Device
from autopar.costmodel.device.elementwise import memory_seconds, with_launch
from autopar.costmodel.step.casts import added_bytes
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.ir import Tensor
from autopar.planning.space import Multiplicities
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.schedule import Schedule, Types

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """A parameter's way from its storage to its use, on every mesh axis.

    The last dim of the arrays is the mesh axis.

    `group`: axes with equal numbers are one group. `gathered`: the parameter is gathered over the
    mesh axis; `first`: it is split along its first dim. `reduced`: its gradient is reduced where
    the parameter was gathered; `summed`: where the parameter is stored whole. `shards`: the number
    of shards in storage.
    """

    group: Ints
    gathered: Bools
    first: Bools
    reduced: Bools
    summed: Bools
    shards: Floats


def way_of(stored: Layout, used: Layout, mesh: Sequence[int]) -> Way:
    """The way between two layouts."""
    split = [before.kind is Kind.SPLIT for before in stored]
    gathered = [
        is_split and after.kind is not Kind.SPLIT
        for is_split, after in zip(split, used, strict=True)
    ]
    shares = [after.kind is Kind.BROADCAST for after in used]
    first = [
        before.kind is Kind.SPLIT and before.dim == 0 and before.parts == 1 for before in stored
    ]
    whole = [
        before.kind is Kind.REPLICATED and share
        for before, share in zip(stored, shares, strict=True)
    ]
    count = math.prod(size for size, is_split in zip(mesh, split, strict=True) if is_split)
    pairs = list(zip(stored, used, strict=True))
    return Way(
        group=np.array([pairs.index(pair) for pair in pairs], dtype=np.int64),
        gathered=np.array(gathered),
        first=np.array(first),
        reduced=np.array(gathered) & np.array(shares),
        summed=np.array(whole),
        shards=np.array(float(count)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Handling:
    """Seconds of a device's work on a parameter and its gradient.

    `gather`, `reduce`: copies for a gather, and for the reduction of a gathered parameter's
    gradient. `sum`: copies for the all-reduce of the gradient of a parameter stored whole. `cast`:
    of a micro-batch's gradient. `add_used`, `add_stored`: its addition in the layout of use, and in
    that of storage.
    """

    gather: Floats
    reduce: Floats
    sum: Floats
    cast: Floats
    add_used: Floats
    add_stored: Floats

    def seconds(self, work: Multiplicities) -> Floats:
        """Seconds of a step."""
        ahead, back = work.gathers
        first = self.cast - self.each(work)  # the first micro-batch's gradients are added to none
        moved = ahead * self.gather + back * self.reduce + work.once * self.sum
        return (1 - work.covers) * moved + work.counted * self.each(work) + first

    def each(self, work: Multiplicities) -> Floats:
        """Seconds of every further pass for casting and adding a gradient."""
        # Gathered gradients are added as they are used, and reduced once at the end.
        added = (
            np.where(self.gather > 0, self.add_used, self.add_stored)
            if work.zero == 1
            else self.add_stored
        )
        return self.cast + added if work.accumulating else self.cast

    @property
    def further(self) -> Handling:
        """The work of a further way of the same parameter, without its gradient."""
        none = np.zeros_like(self.cast)
        return replace(self, cast=none, add_used=none, add_stored=none)

    def under(self, schedule: Schedule) -> Handled:
        """Return the seconds of one way under a schedule, in each pass and once a step."""
        every = schedule.gathered == "per_pass"
        shards = schedule.gathered == "per_pass" or schedule.accumulated == "shards"
        gather = float(self.gather)
        reduce = float(self.reduce)
        cast = float(self.cast)
        added = float(self.add_stored if shards or not gather else self.add_used)
        more = (schedule.micro_batches - 1) / schedule.micro_batches * added
        return Handled(
            forward=gather if every else 0.0,
            backward=cast + more + (gather if every else 0.0) + (reduce if shards else 0.0),
            once=float(self.sum) + (0.0 if every else gather) + (0.0 if shards else reduce),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Handled:
    """Seconds in the forward and the backward pass of a micro-batch, and `once` a step."""

    forward: float
    backward: float
    once: float


def handling(
    tensor: Tensor, way: Way, prices: MeshPrices, types: Types, *, trained: bool
) -> Handling:
    """The seconds of a parameter's ways on a mesh, if parameters travel together in units."""
    mesh = prices.mesh.shape
    device = prices.cluster.device
    value = tensor.bytes / way.shards
    gradient = types.reduced_bytes(tensor) / way.shards
    grown = np.ones(np.broadcast_shapes(way.shards.shape, way.gathered.shape[:-1]))
    # A parameter of more than half a unit is likely to be a unit of its own.
    alone = (
        2 * value * np.where(way.gathered, np.array(mesh, dtype=np.float64), 1.0).prod(axis=-1)
        > prices.unit_bytes
    )
    gather, reduce, total = (np.zeros(grown.shape) for _ in range(3))
    for axis in reversed(range(len(mesh))):
        innermost, size = _group_of(way.group, axis, mesh)
        # Axes of one group are gathered together, at the innermost of them.
        over = way.gathered[..., axis] & innermost
        first = way.first[..., axis]
        gather += np.where(over, memory_seconds(2 * value * grown, device), 0.0)
        gather += np.where(
            over & ~(alone & first),
            memory_seconds(2 * value * grown * size, device) + device.launch,
            0.0,
        )
        # Chunks along another dim than the first have to be made contiguous first.
        dealt = np.where(first, 2.0, 4.0) * gradient * grown * size
        reduce += np.where(over & way.reduced[..., axis], memory_seconds(dealt, device), 0.0)
        total += np.where(
            way.summed[..., axis] & innermost, memory_seconds(2 * gradient, device), 0.0
        )
        grown = np.where(over, grown * size, grown)
    # `grown` is now the factor by which the gathers over all axes enlarge the shard.
    none = np.zeros(grown.shape)
    if not trained:
        return Handling(
            gather=gather, reduce=none, sum=none, cast=none, add_used=none, add_stored=none
        )
    habits = prices.cluster.framework.habits
    # A gradient of the type in which it travels needs no copy.
    casts = habits.casts_gradients and types.reduced(tensor) != tensor.dtype
    added = np.broadcast_to(added_bytes(tensor, types, habits) / way.shards, grown.shape)
    both = (tensor.own_bytes + types.reduced_bytes(tensor)) / way.shards * grown
    return Handling(
        gather=gather,
        reduce=reduce,
        sum=total,
        cast=_streamed(both, device) if casts else none,
        add_used=_streamed(added * grown, device) if added.any() else none,
        add_stored=_streamed(added, device) if added.any() else none,
    )


def _group_of(group: Ints, axis: int, mesh: Sequence[int]) -> tuple[Bools, Floats]:
    """Whether an axis is the innermost of its group, and the number of devices in the group."""
    alike = [group[..., other] == group[..., axis] for other in range(len(mesh))]
    inner = np.zeros(group.shape[:-1], dtype=bool)
    for same in alike[axis + 1 :]:
        inner |= same
    size = np.ones(group.shape[:-1])
    for same, count in zip(alike, mesh, strict=True):
        size = np.where(same, size * count, size)
    return ~inner, size


def home_seconds(
    tensor: Tensor, shards: Floats | NDArray[np.int64], types: Types, device: Device
) -> Floats:
    """Return seconds of casting the sum of a parameter's gradients to the type of storage.

    That is done once a step.
    """
    if types.reduced(tensor) == types.stored(tensor):
        return np.zeros(len(shards))
    return _streamed((types.reduced_bytes(tensor) + types.stored_bytes(tensor)) / shards, device)


def _streamed(nbytes: Floats, device: Device) -> Floats:
    return with_launch(0.0, memory_seconds(nbytes, device), device)
