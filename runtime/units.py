"""Parameters in units: gathered flat before use, released behind it, their gradients reduced flat.

A unit belongs to nodes of the program, not to hooks on parameters: the runner decides when it is gathered, released and
reduced. A released value keeps its tensor and frees the memory behind it. So the tensors that autograd has saved are
valid again once the value is gathered for the backward pass.

Shards are stored in one type and cast to the type of the computation when they are gathered. Gradients are cast to the
type in which they travel as soon as the backward pass has made them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from autopar.order.scheduled import Scheduled
from autopar.order.units import Mode, Unit, gather_collectives, reduce_collectives
from autopar.order.value_flow import PlacedValue, moves_value, only_casts
from autopar.sharding.layout import local_shape
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Bucket, Redistribute
from autopar.sharding.redistribution import changed_axes

from .collectives import AxisGroup, DeviceGroups
from .compression.low_rank import LowRank, finished
from .flat import Moving, carry
from .gradient_factors import gradient_factors
from .redistribution import Move, step_actions

Stored = Callable[[str], Tensor]
"""This rank's stored shard of a parameter."""


class Gradients:
    """The gradients of a backward pass so far: by place, and the names of parameters that have any."""

    def __init__(self) -> None:
        self.at: dict[PlacedValue, Tensor] = {}
        self.reached: set[str] = set()
        self._own: set[PlacedValue] = set()  # places whose tensor nothing else holds

    def add(self, place: PlacedValue, gradient: Tensor) -> None:
        """Add a contribution of the backward pass."""
        self.reached.add(place[0])
        self.bring(place, gradient)

    def bring(self, place: PlacedValue, gradient: Tensor) -> None:
        """Add a gradient from another place of the same parameter, zeros if the loss does not reach it."""
        before = self.at.get(place)
        if before is None:
            self.at[place] = gradient
        elif place in self._own:
            before.add_(gradient)
        else:
            self.at[place] = before + gradient
            self._own.add(place)

    def bring_all(self, places: Sequence[PlacedValue], gradients: Sequence[Tensor]) -> None:
        """Add gradients from several places."""
        for place, gradient in zip(places, gradients, strict=True):
            self.bring(place, gradient)

    def copied(self) -> Gradients:
        """A copy in tensors of its own."""
        other = Gradients()
        other.at, other.reached = {place: gradient.clone() for place, gradient in self.at.items()}, set(self.reached)
        return other

    def join(self, other: Gradients) -> None:
        """Add all of another's."""
        self.reached |= other.reached
        for place, gradient in other.at.items():
            self.bring(place, gradient)

    def drop(self, name: str) -> None:
        """Drop all gradients of a parameter."""
        self.reached.discard(name)
        for place in [place for place in self.at if place[0] == name]:
            self.take(place)

    def scale(self, factor: float) -> None:
        """Multiply all gradients."""
        for place, gradient in self.at.items():
            self.at[place] = gradient * factor
        self._own.update(self.at)

    def take(self, place: PlacedValue) -> Tensor | None:
        """The gradient at a place, which is there no longer."""
        self._own.discard(place)
        return self.at.pop(place, None)


class _Group:
    """Redistributions that travel together: where they start and end, and the steps between; casts `lead` nowhere."""

    def __init__(self, plan: Scheduled, members: Sequence[int], groups: DeviceGroups) -> None:
        steps = [step for index in members if isinstance(step := plan.program.steps[index], Redistribute)]
        self.starts: list[PlacedValue] = [(step.tensor, step.chain[0]) for step in steps]
        self.ends: list[PlacedValue] = [(step.tensor, step.chain[-1]) for step in steps]
        self.flows, self.moves, self.leads = steps[0].gradient, moves_value(steps[0]), not only_casts(steps[0])
        self.differentiable = steps[0].differentiable
        self.shapes = [local_shape(step.chain[-1], plan.program.graph.tensors[step.tensor].shape, groups.mesh.shape) for step in steps]
        self.ahead: list[tuple[list[Move], AxisGroup]] = []
        self.back: list[tuple[list[Move], AxisGroup]] = []
        for pairs in zip(*(list(itertools.pairwise(step.chain[step.bucketed :])) for step in steps), strict=True):
            over = groups.over(changed_axes(*pairs[0]))
            both = [step_actions(before, after, groups.mesh.shape) for before, after in pairs]
            self.ahead.append(([ahead for ahead, _ in both], over))
            self.back.insert(0, ([back for _, back in both], over))


class ParameterUnits:
    """The units of a chunk on this rank; `stored` gives the shards, `values` holds the gathered tensors by place."""

    def __init__(self, plan: Scheduled, groups: DeviceGroups, stored: Stored, device: torch.device) -> None:
        self.plan, self.groups, self.stored, self.device = plan, groups, stored, device
        self.units: tuple[Unit, ...] = plan.units
        self.members = [[_Group(plan, group, groups) for group in unit.groups] for unit in plan.units]
        types, parameters = plan.schedule.types, plan.program.graph.parameters
        self.dtypes: dict[str, torch.dtype] = {t.name: getattr(torch, t.dtype) for t in parameters}
        self.masters: dict[str, torch.dtype] = {t.name: getattr(torch, types.stored(t)) for t in parameters}
        self.reduced: dict[str, torch.dtype] = {t.name: getattr(torch, plan.schedule.reduced(t)) for t in parameters}
        self.low_rank = LowRank()
        self.factors = gradient_factors(plan)
        self.values: dict[PlacedValue, Tensor] = {}
        self.kept: dict[PlacedValue, Tensor] = {}  # values of units in mode again, with or without memory
        self.held: set[int] = set()
        self.coming: dict[int, Moving] = {}
        self.going: list[tuple[int, bool, Moving]] = []  # units, whether they end in a sum in place, and their gradients on the way
        self.unit_of = {place: number for number, groups_ in enumerate(self.members) for group in groups_ for place in group.ends}
        self.behind: dict[int, set[int]] = {}  # units that start from values of a unit: their gradients come home first
        for number, groups_ in enumerate(self.members):
            for place in (place for group in groups_ for place in group.starts if place in self.unit_of):
                self.behind.setdefault(self.unit_of[place], set()).add(number)
        still = [group for groups_ in self.members for group in groups_ if not group.moves]
        self.cast = {end for groups_ in self.members for group in groups_ if group.moves and not group.leads for end in group.ends}
        self.alias = {end: start for group in still for start, end in zip(group.starts, group.ends, strict=True)}

    # --- values ---

    def value(self, place: PlacedValue) -> Tensor:
        """A parameter's used value: a gathered value, after waiting for it, or the shard itself."""
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
        unit = self.units[number]
        count = sum(1 for c in gather_collectives(self.plan.program, unit) if self._talks(c.axes))
        self.coming[number] = Moving(self._gathering(number), count)

    def wait(self, numbers: Iterable[int]) -> None:
        """Wait for the values of units that are on their way."""
        for number in numbers:
            if number in self.coming:
                self.coming.pop(number).finish()

    def _gathering(self, number: int) -> Generator[Tensor, Tensor, None]:
        again = self.units[number].mode is Mode.AGAIN
        for group in self.members[number]:
            if not group.moves:
                continue
            # A cast starts from the shard, and so does a step behind a cast, since its own unit may have been released.
            found = (self.stored(place[0]) if place in self.cast else self.value(place) for place in group.starts)
            starts = [value.to(self.dtypes[name]) for value, (name, _) in zip(found, group.starts, strict=True)]
            if not again:
                made = yield from carry(starts, group.ahead)
                self.values.update(zip(group.ends, made, strict=True))
                continue
            kept = [self._room(place, shape) for place, shape in zip(group.ends, group.shapes, strict=True)]
            # Autograd may have saved these very tensors: for it nothing has changed.
            with torch.autograd.grad_mode._unsafe_preserve_version_counter(tuple(kept)):
                yield from carry(starts, group.ahead, kept)
            self.values.update(zip(group.ends, kept, strict=True))

    def _room(self, place: PlacedValue, shape: tuple[int, ...]) -> Tensor:
        """The tensor of a gathered value, with memory behind it."""
        found = self.kept.get(place)
        if found is None:
            # A call for inference may be the first: autograd takes none of the tensors that are made in its mode.
            with torch.inference_mode(False):
                found = self.kept[place] = torch.empty(shape, dtype=self.dtypes[place[0]], device=self.device)
        else:
            found.untyped_storage().resize_(found.numel() * found.element_size())
        return found

    def lasting(self, value: Tensor) -> Tensor:
        """A value that survives the release of units: a copy, if it shares memory with a unit in mode again."""
        gathered = {kept.untyped_storage()._cdata for kept in self.kept.values()}
        return value.clone() if value.untyped_storage()._cdata in gathered else value

    def release(self, number: int) -> None:
        """Let the values of a unit go."""
        self.wait([number])
        self.held.discard(number)
        for group in self.members[number]:
            for place in group.ends if group.moves else ():
                self.values.pop(place, None)
                if place in self.kept:
                    self.kept[place].untyped_storage().resize_(0)

    # --- gradients ---

    def travelling(self, name: str, gradient: Tensor) -> Tensor:
        """A gradient as the backward pass gives it, in the type in which it is added up and travels."""
        return gradient.to(self.reduced[name])

    def reduce(self, number: int, gradients: Gradients, *, last: bool, only_present: bool = False) -> None:
        """Begin to reduce a unit's gradients; `last`: in a step's last micro-batch, also sum them over the ranks.

        `only_present`: skip groups without any gradient. Reductions begun before advance one step, so that their
        messages are freed and their gradients stored before those of the next micro-batch. A last sum in place need not
        hurry.
        """
        for other, rests, moving in self.going:
            if other in self.behind.get(number, ()):
                moving.finish()
            elif moving.left or not rests:
                moving.go_on()
        unit = self.units[number]
        count = sum(1 for c in reduce_collectives(self.plan.program, unit, self.plan.schedule.types, last=last) if self._talks(c.axes))
        moving = Moving(self._reducing(number, gradients, last=last, all_groups=not only_present), count)
        self.going.append((number, last and bool(unit.buckets), moving))

    def _reducing(self, number: int, gradients: Gradients, *, last: bool, all_groups: bool) -> Generator[Tensor, Tensor, None]:
        unit = self.units[number]
        if last or unit.mode is not Mode.ONCE:
            for group in reversed(self.members[number]):
                if not group.leads or not group.differentiable:
                    continue
                if not ((group.flows and all_groups) or any(place in gradients.at for place in group.ends)):
                    continue
                pairs = zip(group.ends, group.shapes, strict=True)
                # Only the chain holds the shares, so they are freed once their message has been made.
                gradients.bring_all(group.starts, (yield from carry([self._taken(gradients, *pair) for pair in pairs], group.back)))
        for bucket in unit.buckets if last else ():
            if bucket.factor < 2:  # the bucket of the second factors is part of the first
                yield from self._summing(bucket, gradients)

    def _summing(self, bucket: Bucket, gradients: Gradients) -> Generator[Tensor, Tensor, None]:
        """Sum the gradients of a bucket, or their low-rank factors."""
        places = [(name, self.plan.program.assignment.storage[name]) for name in bucket.parameters]
        shapes = [tuple(self.stored(name).shape) for name in bucket.parameters]
        steps = [([Move("all_reduce")] * len(places), self.groups.over(axes)) for axes in bucket.sums]
        pairs = zip(places, shapes, strict=True)
        if not bucket.factor:  # only the chain holds the shares, so they are freed once their message has been made
            sums = yield from carry([self._taken(gradients, *pair) for pair in pairs], steps)
        else:
            making = self.low_rank.summed(bucket.parameters, [self._taken(gradients, *pair) for pair in pairs], bucket.ranks)
            rights = yield from carry(making.send((yield from carry(next(making), steps))), steps)
            sums = finished(making, rights)
        gradients.at.update(zip(places, sums, strict=True))

    def _taken(self, gradients: Gradients, place: PlacedValue, shape: tuple[int, ...]) -> Tensor:
        """The gradient at a place, taken away from there; zeros where there is none."""
        found = gradients.take(place)
        return torch.zeros(shape, dtype=self.reduced[place[0]], device=self.device) if found is None else found

    def _talks(self, axes: Axes) -> bool:
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
        """Take away the gradients of this rank's shards, in their types, of parameters that the loss reached."""
        found: dict[str, Tensor] = {}
        for name, layout in self.plan.program.assignment.storage.items():
            if name in gradients.reached and (gradient := gradients.take((name, layout))) is not None:
                factor = self.factors.get(name, 1.0)
                found[name] = (gradient if factor == 1.0 else gradient * factor).to(self.masters[name])
        return found
