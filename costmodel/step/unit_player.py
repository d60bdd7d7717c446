"""Units of parameters on the streams of a step: gathers and reductions by collective.

a gather      begins with the first collective of its first group; the others follow one by one
              when a segment needs the unit, and the segment waits for them. Shards are copied
              into the message and out of it
a reduction   begins in the same way, and issues its next collective whenever another reduction
              begins; the end of the step waits for all
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.costmodel.device.elementwise import memory_seconds, with_launch
from autopar.costmodel.memory.flat_messages import FlatStep, flat_steps
from autopar.order.scheduled import Mode, Scheduled
from autopar.order.units import Unit
from autopar.order.value_flow import moves_value
from autopar.sharding.mesh import Axes, degree_of
from autopar.sharding.program import Redistribute

from .casts import unit_seconds
from .issuer import Issuer
from .shared_link import Sent


@dataclass(slots=True)
class _Moving:
    """A unit's chain of collectives under way.

    `until`: when the present collective ends (None: it is over). `steps`: the collectives behind
    it. `phase`: in which it began. `rests`: the last one is a sum in place, for which nothing waits
    before the end of the step.
    """

    unit: int
    steps: Iterator[Sent]
    until: Sent | None
    left: int
    phase: str
    rests: bool = False


class UnitPlayer:
    """Plays the collectives of a plan's units.

    `hides`: reductions of gradients run under the backward pass.
    """

    def __init__(self, plan: Scheduled, issuer: Issuer, *, hides: bool) -> None:
        self.plan = plan
        self.issuer = issuer
        self.hides = hides
        self.clock = issuer.clock
        self.cluster = issuer.prices.cluster
        self.program = plan.program
        self.flat: dict[tuple[tuple[int, ...], bool], list[FlatStep]] = {}
        self.casts = unit_seconds(plan, self.cluster)
        self.followers = plan.followers()
        self.coming: dict[int, _Moving] = {}
        self.going: list[_Moving] = []

    def gather(self, unit: Unit) -> None:
        """Begin to gather a unit."""
        self.coming[unit.number] = self._begun(unit.number, self._gathering(unit))

    def settle(self) -> None:
        """Wait for all reductions."""
        for moving in self.going:
            self._finish(moving)

    def wait(self, units: Sequence[int]) -> None:
        """Go no further before these units are gathered."""
        for unit in units:
            self._finish(self.coming.pop(unit, None))

    def reduce(self, unit: Unit, *, last: bool) -> None:
        """Begin to reduce a unit's gradients; reductions begun before continue."""
        for moving in self.going:
            if moving.unit in self.followers.get(unit.number, ()):
                self._finish(moving)
            # A last sum in place has no step behind it, so nothing waits for it before the step
            # ends.
            elif moving.left > 0 or not moving.rests:
                self._go_on(moving)
        self.going = [moving for moving in self.going if moving.until is not None]
        steps = (
            [s for g in unit.groups for s in self._flat(g, back=True) if s.kind]
            if last or unit.mode is not Mode.ONCE
            else []
        )
        left = len(steps) + sum(
            self._talks(axes) for bucket in unit.buckets for axes in bucket.sums if last
        )
        self.going.append(
            self._begun(
                unit.number,
                self._reducing(unit, last=last),
                left,
                rests=last and bool(unit.buckets),
            )
        )
        # Ranks that take turns on a core hide nothing under computation.
        if not self.hides:
            self._finish(self.going[-1])

    def _gathering(self, unit: Unit) -> Iterator[Sent]:
        self.clock.compute(
            f"unit {unit.number}", "cast parameters", self.casts.get(unit.number, 0.0)
        )
        for group in unit.groups:
            first = self.program.steps[group[0]]
            assert isinstance(first, Redistribute)
            if moves_value(first):
                for step in self._flat(group, back=False):
                    yield from self._sent(step, first.tensor)

    def _reducing(self, unit: Unit, *, last: bool) -> Iterator[Sent]:
        # Backward, the group that was gathered last has its gradients first.
        for group in reversed(unit.groups) if last or unit.mode is not Mode.ONCE else ():
            first = self.program.steps[group[0]]
            assert isinstance(first, Redistribute)
            for step in self._flat(group, back=True) if first.gradient else ():
                yield from self._sent(step, first.tensor)
        for bucket in unit.buckets if last else ():
            for axes in bucket.sums:
                if self._talks(axes):
                    self.clock.compute(
                        bucket.parameters[0], "flatten", self._traffic([2.0 * bucket.nbytes])
                    )
                    yield self.issuer.issue("all_reduce", axes, bucket.nbytes, bucket.parameters[0])

    def _sent(self, step: FlatStep, name: str) -> Iterator[Sent]:
        """Play one step of a flat chain, with the copies into the message and out of it."""
        if step.kind:
            self.clock.compute(name, "flatten", self._traffic([step.traffic]))
            yield self.issuer.issue(step.kind, step.axes, step.nbytes, name)
            self.clock.compute(
                name, "unflatten", self._traffic([2.0 * size for size in step.copied])
            )

    def _talks(self, axes: Axes) -> bool:
        return degree_of(axes, self.issuer.prices.mesh.shape) > 1

    def _flat(self, group: tuple[int, ...], *, back: bool) -> list[FlatStep]:
        if (group, back) not in self.flat:
            self.flat[group, back] = flat_steps(self.plan, group, back=back)
        return self.flat[group, back]

    def _begun(
        self, unit: int, steps: Iterator[Sent], left: int = 0, *, rests: bool = False
    ) -> _Moving:
        # The generator issues the first collective here, and each later one when it is asked.
        return _Moving(unit, steps, next(steps, None), left - 1, self.clock.phase, rests)

    def _go_on(self, moving: _Moving) -> None:
        if moving.until is not None:
            self.clock.wait(moving.until.end)
            # A collective counts to the phase in which its unit began to move.
            now = self.clock.phase
            self.clock.phase = moving.phase
            moving.until = next(moving.steps, None)
            self.clock.phase = now
            moving.left -= 1

    def _finish(self, moving: _Moving | None) -> None:
        while moving is not None and moving.until is not None:
            self._go_on(moving)

    def _traffic(self, nbytes: Sequence[float]) -> float:
        """Seconds of kernels that each read and write so many bytes."""
        device = self.cluster.device
        return (
            float(with_launch(0.0, memory_seconds(np.array(nbytes), device), device).sum())
            if nbytes
            else 0.0
        )
