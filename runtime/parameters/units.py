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

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from autopar.order.scheduled import Scheduled
from autopar.order.unit_collectives import Chain
from autopar.order.unit_travel import UnitTravel
from autopar.order.units import Mode, Unit
from autopar.order.value_flow import PlacedValue
from autopar.runtime.ranks.device_groups import AxisGroup, DeviceGroups
from autopar.runtime.redistribution.flat_messages import Moving, carry
from autopar.runtime.redistribution.steps import Move
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Bucket

from .gradient_factors import gradient_factors
from .gradients import Gradients
from .joint_redistributions import JointRedistribution
from .low_rank import LowRank, finished
from .narrow_members import NarrowMembers

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
        # Where values travel as well, parameters have a group of their own.
        self.apart = {axes: groups.of_parameters(axes) for axes in sorted(plan.shared_groups())}
        self.stored = stored
        self.device = device
        self.units: tuple[Unit, ...] = plan.units
        self.members = [
            [
                JointRedistribution(plan, group, self._over, groups.coordinate, device)
                for group in unit.groups
            ]
            for unit in plan.units
        ]
        self.of_group = {
            group: joint
            for unit, members in zip(plan.units, self.members, strict=True)
            for group, joint in zip(unit.groups, members, strict=True)
        }
        types = plan.schedule.types
        parameters = plan.program.graph.parameters
        self.dtypes: dict[str, torch.dtype] = {t.name: getattr(torch, t.dtype) for t in parameters}
        self.narrow = {tensor.name for tensor in parameters if tensor.narrow is not None}
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
        self.travel: UnitTravel[Moving] = UnitTravel(plan)
        self.unit_of: dict[PlacedValue, int] = {}
        # Places that are casts of shards, and places whose value is that of another place.
        self.cast: set[PlacedValue] = set()
        self.alias: dict[PlacedValue, PlacedValue] = {}
        self._index()

    def _index(self) -> None:
        """Note where the values of units begin and end."""
        for number, group in (
            (number, group) for number, own in enumerate(self.members) for group in own
        ):
            self.unit_of.update(dict.fromkeys(group.ends, number))
            if not group.moves:
                self.alias.update(zip(group.ends, group.starts, strict=True))
            elif not group.leads:
                self.cast.update(group.ends)

    def _over(self, axes: Axes) -> AxisGroup:
        return self.apart.get(axes) or self.groups.over(axes)

    # --- values ---

    def value(self, place: PlacedValue) -> Tensor:
        """A parameter's value as an operator reads it: gathered and waited for, or the shard."""
        while place in self.alias:
            place = self.alias[place]
        if place not in self.unit_of:
            return self.stored(place[0])
        if place not in self.values:
            self.travel.wait([self.unit_of[place]])
        return self.values[place]

    def gather(self, number: int, round_number: int) -> None:
        """Issue a round of making the values of a unit."""
        self.held.add(number)
        self.travel.gather(
            number, round_number, lambda chain: Moving(self._gathering(number, chain))
        )

    def gather_whole(self, number: int) -> None:
        """Issue all rounds of making the values of a unit."""
        for round_number in range(self.plan.gather_rounds(number)):
            self.gather(number, round_number)

    def _gathering(self, number: int, chain: Chain) -> Generator[Tensor, Tensor, None]:
        group = self.of_group[chain.group]
        starts = self._starts(group.starts)
        narrow = NarrowMembers(group.casts, starts)
        if group.casts:
            starts = yield from narrow.cast(group.summed)
        if self.units[number].mode is not Mode.PER_PASS:
            results = yield from carry(starts, group.ahead)
            self.values.update(zip(group.ends, narrow.read(results), strict=True))
            return
        with ExitStack() as stack:

            def rooms() -> list[Tensor]:
                shapes = [cast.elements_shape for cast in group.casts] or group.shapes
                pairs = zip(group.ends, shapes, strict=True)
                targets = [self._room(place, shape) for place, shape in pairs]
                # Autograd may have saved these very tensors: for it nothing has changed.
                stack.enter_context(
                    torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(targets))
                )
                return targets

            results = yield from carry(starts, group.ahead, rooms)
        self.values.update(zip(group.ends, narrow.read(results), strict=True))

    def _starts(self, places: Sequence[PlacedValue]) -> list[Tensor]:
        """The values from which a gather starts, in the type of the computation."""
        # A cast starts from the shard, and so does a step behind a cast, since its own unit may
        # have been released.
        values = [
            self.stored(place[0]) if place in self.cast else self.value(place) for place in places
        ]
        dtypes = [self.dtypes[place[0]] for place in places]
        cast = [
            value if value.dtype is dtype else torch.empty_like(value, dtype=dtype)
            for value, dtype in zip(values, dtypes, strict=True)
        ]
        other = [pair for pair in zip(cast, values, strict=True) if pair[0] is not pair[1]]
        if other:
            # A GPU casts a whole unit in few kernels, each of which the host would have to start.
            torch._foreach_copy_([target for target, _ in other], [value for _, value in other])
        return cast

    def _room(self, place: PlacedValue, shape: tuple[int, ...]) -> Tensor:
        """The tensor of a gathered value, with memory behind it."""
        tensor = self.rooms.get(place)
        if tensor is None:
            # A call for inference may be the first: autograd takes none of the tensors that are
            # made in its mode.
            with torch.inference_mode(False):
                dtype = torch.uint8 if place[0] in self.narrow else self.dtypes[place[0]]
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
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
        self.travel.wait([number])
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
        self, number: int, round_number: int, micro_batch: int, gradients: Gradients, *, last: bool
    ) -> None:
        """Issue a round of reducing a unit's gradients.

        `last`: in a step's last micro-batch, also sum them over the ranks.
        """
        self.travel.reduce(
            number,
            round_number,
            micro_batch,
            last=last,
            begin=lambda chain: Moving(self._reducing(chain, gradients, all_groups=True)),
        )

    def reduce_present(self, gradients: Gradients) -> None:
        """Reduce the gradients of all units at once, without groups that have none."""
        # From the last unit to the first, as a backward pass makes them.
        for number in reversed(range(len(self.units))):
            for round_number in range(self.plan.reduce_rounds(number, last=True)):
                self.travel.reduce(
                    number,
                    round_number,
                    0,
                    last=True,
                    begin=lambda chain: Moving(self._reducing(chain, gradients, all_groups=False)),
                )
        self.settle()

    def _reducing(
        self, chain: Chain, gradients: Gradients, *, all_groups: bool
    ) -> Generator[Tensor, Tensor, None]:
        if chain.buckets:
            # The bucket of second factors is part of the first.
            yield from self._summing(chain.buckets[0], gradients)
            return
        group = self.of_group[chain.group]
        # All ranks must issue the same collectives: a gradient that is planned to flow travels even
        # from a rank whose loss does not reach the parameter.
        planned = group.flows and all_groups
        present = any(place in gradients.at for place in group.ends)
        if not group.differentiable or not (planned or present):
            return
        pairs = zip(group.ends, group.shapes, strict=True)
        # Only the chain holds the shares, so they are freed once their message is made.
        results = yield from carry([self._taken(gradients, *pair) for pair in pairs], group.back)
        if group.cuts:
            results = [_without_rest(result) for result in results]
        gradients.bring_all(group.starts, results)

    def _summing(self, bucket: Bucket, gradients: Gradients) -> Generator[Tensor, Tensor, None]:
        """Sum the gradients of a bucket, or their low-rank factors."""
        storage = self.plan.program.assignment.storage
        places = [(name, storage[name]) for name in bucket.parameters]
        shapes = [tuple(self.stored(name).shape) for name in bucket.parameters]
        moves = [Move("all_reduce")] * len(places)
        steps = [(moves, self._over(axes)) for axes in bucket.sums]
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

    def settle(self) -> None:
        """Wait for all gradients under way, in the order in which they were begun."""
        self.travel.settle()

    def forget(self) -> None:
        """Drop the remains of an interrupted step."""
        self.travel.forget()
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


def _without_rest(part: Tensor) -> Tensor:
    """A part of a whole sum in memory of its own; as a view it would keep all of the sum."""
    return part.clone() if part.untyped_storage().nbytes() > part.nbytes else part
