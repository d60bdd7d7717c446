"""Parameters in units, which are gathered before use and released behind it.

The members of a unit share their messages: one to gather them, one to reduce their gradients.

A unit belongs to nodes of the program, not to hooks on parameters: the runner decides when it is
gathered, released and reduced. A released value keeps its tensor and frees the memory behind it. So
the tensors that autograd has saved are valid again once the value is gathered for the backward
pass.

Shards are stored in one type and cast to the type of the computation when they are gathered.
Gradients are cast to the type in which they travel as soon as the backward pass has made them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping

import torch
from torch import Tensor

from autopar.order.scheduled import Scheduled
from autopar.order.unit_collectives import gather_collectives, reduce_collectives
from autopar.order.units import Mode, Unit
from autopar.order.value_flow import PlacedValue
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.redistribution.flat_messages import Moving, carry
from autopar.runtime.redistribution.steps import Move
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Bucket

from .gradient_factors import gradient_factors
from .gradients import Gradients
from .joint_redistributions import JointRedistribution
from .low_rank import LowRank, finished

Stored = Callable[[str], Tensor]
"""This rank's stored shard of a parameter."""


class ParameterUnits:
    """The units of a chunk on this rank.

    `stored` gives the shards, `values` holds the gathered tensors by place.
    """

    def __init__(
        self, plan: Scheduled, groups: DeviceGroups, stored: Stored, device: torch.device
    ) -> None:
        self.plan = plan
        self.groups = groups
        self.stored = stored
        self.device = device
        self.units: tuple[Unit, ...] = plan.units
        self.members = [
            [JointRedistribution(plan, group, groups) for group in unit.groups]
            for unit in plan.units
        ]
        types = plan.schedule.types
        parameters = plan.program.graph.parameters
        self.dtypes: dict[str, torch.dtype] = {t.name: getattr(torch, t.dtype) for t in parameters}
        self.masters: dict[str, torch.dtype] = {
            t.name: getattr(torch, types.stored(t)) for t in parameters
        }
        self.reduced: dict[str, torch.dtype] = {
            t.name: getattr(torch, plan.schedule.reduced(t)) for t in parameters
        }
        self.low_rank = LowRank()
        self.factors = gradient_factors(plan)
        self.values: dict[PlacedValue, Tensor] = {}
        # Tensors of units in mode per_pass, with memory while they are gathered.
        self.rooms: dict[PlacedValue, Tensor] = {}
        self.held: set[int] = set()
        self.coming: dict[int, Moving] = {}
        # Units, whether they end in a sum in place, and their gradients under way.
        self.going: list[tuple[int, bool, Moving]] = []
        self.unit_of: dict[PlacedValue, int] = {}
        # Places that are casts of shards, and places whose value is that of another place.
        self.cast: set[PlacedValue] = set()
        self.alias: dict[PlacedValue, PlacedValue] = {}
        # Units that start from values of a unit: their gradients must come home before its own.
        self.behind: dict[int, set[int]] = {}
        self._index()

    def _index(self) -> None:
        """Note where the values of units begin and end."""
        members = [(number, group) for number, own in enumerate(self.members) for group in own]
        for number, group in members:
            self.unit_of.update(dict.fromkeys(group.ends, number))
            if not group.moves:
                self.alias.update(zip(group.ends, group.starts, strict=True))
            elif not group.leads:
                self.cast.update(group.ends)
        for number, group in members:
            for place in group.starts:
                if place in self.unit_of:
                    self.behind.setdefault(self.unit_of[place], set()).add(number)

    # --- values ---

    def value(self, place: PlacedValue) -> Tensor:
        """A parameter's value as an operator reads it: gathered and waited for, or the shard."""
        while place in self.alias:
            place = self.alias[place]
        if place not in self.unit_of:
            return self.stored(place[0])
        if place not in self.values:
            self.wait([self.unit_of[place]])
        return self.values[place]

    def gather(self, number: int) -> None:
        """Begin to make the values of a unit."""
        self.wait([number])
        self.held.add(number)
        collectives = gather_collectives(self.plan.program, self.units[number])
        count = sum(self._talks(collective.axes) for collective in collectives)
        self.coming[number] = Moving(self._gathering(number), count)

    def wait(self, numbers: Iterable[int]) -> None:
        """Wait for the values of units that are on their way."""
        for number in numbers:
            if number in self.coming:
                self.coming.pop(number).finish()

    def _gathering(self, number: int) -> Generator[Tensor, Tensor, None]:
        per_pass = self.units[number].mode is Mode.PER_PASS
        for group in self.members[number]:
            if not group.moves:
                continue
            starts = [self._start(place) for place in group.starts]
            if not per_pass:
                results = yield from carry(starts, group.ahead)
                self.values.update(zip(group.ends, results, strict=True))
                continue
            pairs = zip(group.ends, group.shapes, strict=True)
            targets = [self._room(place, shape) for place, shape in pairs]
            # Autograd may have saved these very tensors: for it nothing has changed.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(targets)):
                yield from carry(starts, group.ahead, targets)
            self.values.update(zip(group.ends, targets, strict=True))

    def _start(self, place: PlacedValue) -> Tensor:
        """The value from which a gather starts, in the type of the computation."""
        # A cast starts from the shard, and so does a step behind a cast, since its own unit may
        # have been released.
        value = self.stored(place[0]) if place in self.cast else self.value(place)
        return value.to(self.dtypes[place[0]])

    def _room(self, place: PlacedValue, shape: tuple[int, ...]) -> Tensor:
        """The tensor of a gathered value, with memory behind it."""
        tensor = self.rooms.get(place)
        if tensor is None:
            # A call for inference may be the first: autograd takes none of the tensors that are
            # made in its mode.
            with torch.inference_mode(False):
                tensor = torch.empty(shape, dtype=self.dtypes[place[0]], device=self.device)
            self.rooms[place] = tensor
        else:
            tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
        return tensor

    def surviving_release(self, value: Tensor) -> Tensor:
        """A value that survives the release of units.

        It is a copy if it shares memory with a unit in mode per_pass.
        """
        gathered = {tensor.untyped_storage()._cdata for tensor in self.rooms.values()}
        return value.clone() if value.untyped_storage()._cdata in gathered else value

    def release(self, number: int) -> None:
        """Let the values of a unit go."""
        self.wait([number])
        self.held.discard(number)
        for group in self.members[number]:
            if not group.moves:
                continue
            for place in group.ends:
                self.values.pop(place, None)
                # The tensor stays, for autograd may have saved it; only its memory goes.
                if place in self.rooms:
                    self.rooms[place].untyped_storage().resize_(0)

    # --- gradients ---

    def travelling(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient in the type in which it is added up and travels."""
        return gradient.to(self.reduced[name])

    def reduce(
        self, number: int, gradients: Gradients, *, last: bool, only_present: bool = False
    ) -> None:
        """Begin to reduce a unit's gradients.

        `last`: in a step's last micro-batch, also sum them over the ranks. `only_present`: skip
        groups without any gradient.
        """
        # Reductions begun before advance one step, so that their messages are freed and their
        # gradients stored before those of the next micro-batch. A last sum in place need not hurry.
        for other, rests, moving in self.going:
            if other in self.behind.get(number, ()):
                moving.finish()
            elif moving.left or not rests:
                moving.go_on()
        self.going = [entry for entry in self.going if not entry[2].ended]
        unit = self.units[number]
        types = self.plan.schedule.types
        collectives = reduce_collectives(self.plan.program, unit, types, last=last)
        count = sum(self._talks(collective.axes) for collective in collectives)
        reducing = self._reducing(number, gradients, last=last, all_groups=not only_present)
        self.going.append((number, last and bool(unit.buckets), Moving(reducing, count)))

    def _reducing(
        self, number: int, gradients: Gradients, *, last: bool, all_groups: bool
    ) -> Generator[Tensor, Tensor, None]:
        unit = self.units[number]
        if last or unit.mode is not Mode.ONCE:
            for group in reversed(self.members[number]):
                if not group.leads or not group.differentiable:
                    continue
                # All ranks must issue the same collectives: a gradient that is planned to flow
                # travels even from a rank whose loss does not reach the parameter.
                planned = group.flows and all_groups
                if not planned and not any(place in gradients.at for place in group.ends):
                    continue
                pairs = zip(group.ends, group.shapes, strict=True)
                # Only the chain holds the shares, so they are freed once their message is made.
                results = yield from carry(
                    [self._taken(gradients, *pair) for pair in pairs], group.back
                )
                gradients.bring_all(group.starts, results)
                # A suspended generator keeps its locals: these would outlive their message.
                del results
        if last:
            for bucket in unit.buckets:
                # The bucket of the second factors is part of the first.
                if bucket.factor < 2:
                    yield from self._summing(bucket, gradients)

    def _summing(self, bucket: Bucket, gradients: Gradients) -> Generator[Tensor, Tensor, None]:
        """Sum the gradients of a bucket, or their low-rank factors."""
        storage = self.plan.program.assignment.storage
        places = [(name, storage[name]) for name in bucket.parameters]
        shapes = [tuple(self.stored(name).shape) for name in bucket.parameters]
        moves = [Move("all_reduce")] * len(places)
        steps = [(moves, self.groups.over(axes)) for axes in bucket.sums]
        pairs = zip(places, shapes, strict=True)
        if not bucket.factor:
            # Only the chain holds the shares, so they are freed once their message is made.
            sums = yield from carry([self._taken(gradients, *pair) for pair in pairs], steps)
        else:
            shares = [self._taken(gradients, *pair) for pair in pairs]
            factors = self.low_rank.summed(bucket.parameters, shares, bucket.ranks)
            # Two rounds: the second factors are made of the sums of the first.
            lefts = yield from carry(next(factors), steps)
            rights = yield from carry(factors.send(lefts), steps)
            sums = finished(factors, rights)
        gradients.at.update(zip(places, sums, strict=True))

    def _taken(self, gradients: Gradients, place: PlacedValue, shape: tuple[int, ...]) -> Tensor:
        """The gradient at a place, taken away from there; zeros where there is none."""
        gradient = gradients.take(place)
        if gradient is None:
            return torch.zeros(shape, dtype=self.reduced[place[0]], device=self.device)
        return gradient

    def _talks(self, axes: Axes) -> bool:
        """Whether a collective over these axes has more than this rank."""
        return self.groups.over(axes).size > 1

    def settle(self) -> None:
        """Wait for all gradients under way, in the order in which they were begun."""
        for _, _, moving in self.going:
            moving.finish()
        self.going.clear()

    def forget(self) -> None:
        """Drop the remains of an interrupted step."""
        self.going.clear()
        self.coming.clear()
        for number in range(len(self.units)):
            self.release(number)

    def home(self, gradients: Gradients) -> Mapping[str, Tensor]:
        """Take away the gradients of this rank's shards, in the types of the shards.

        Parameters that the loss does not reach have none.
        """
        home: dict[str, Tensor] = {}
        for name, layout in self.plan.program.assignment.storage.items():
            if name not in gradients.reached:
                continue
            gradient = gradients.take((name, layout))
            if gradient is None:
                continue
            factor = self.factors.get(name, 1.0)
            if factor != 1.0:
                gradient = gradient * factor
            home[name] = gradient.to(self.masters[name])
        return home
