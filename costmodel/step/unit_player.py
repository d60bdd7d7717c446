"""Units of parameters on the streams of a step: gathers and reductions, round by round.

Every collective is issued behind the computation so far, on the stream of the parameters' group.
A further round first waits for the collective of the round before, and copies shards out of its
message and into the next one. A gather's first reader waits for it; the end of the step waits for
all reductions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from autopar.costmodel.device.elementwise import memory_seconds, with_launch
from autopar.costmodel.memory.flat_messages import FlatStep, flat_steps
from autopar.order.scheduled import Scheduled
from autopar.order.unit_collectives import Chain, scale_messages
from autopar.order.unit_travel import UnitTravel
from autopar.order.units import Unit
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import Redistribute

from .casts import unit_seconds
from .issuer import Issuer
from .mesh_prices import MeshPrices
from .reasons import Reason
from .streams import Sent, Streams, Stretch


class _Moving:
    """A chain of collectives under way; `blocks`: computation waits for each at once."""

    def __init__(self, stretches: Sequence[Stretch], streams: Streams, *, blocks: bool) -> None:
        self.stretches = iter(stretches)
        self.count = len(stretches)
        self.streams = streams
        self.blocks = blocks
        self.sent = self._next()

    def _next(self) -> Sent | None:
        self.count -= 1
        sent = self.streams.append(next(self.stretches))
        # Behind the last collective nothing is sent.
        if not self.count:
            return None
        if self.blocks:
            self.streams.wait(sent)
        return sent

    def go_on(self) -> None:
        """Wait for the collective under way and issue the next one, if there is another."""
        if self.sent is not None:
            self.streams.wait(self.sent)
            self.sent = self._next()

    def finish(self) -> None:
        """Wait for all collectives of the chain."""
        while self.sent is not None:
            self.go_on()


class UnitPlayer:
    """Plays the collectives of a plan's units.

    `hides`: reductions of gradients run under the backward pass. `stretches`: of each chain, up to
    each of its collectives.
    """

    def __init__(
        self, plan: Scheduled, prices: MeshPrices, streams: Streams, *, hides: bool
    ) -> None:
        self.plan = plan
        apart = plan.shared_groups()
        self.gathers = Issuer(prices, streams, Reason.GATHERS, apart)
        self.reductions = Issuer(prices, streams, Reason.REDUCTIONS, apart)
        self.hides = hides
        self.streams = streams
        self.mesh = prices.mesh.shape
        self.cluster = prices.cluster
        self.program = plan.program
        self.stretches: dict[object, list[Stretch]] = {}
        self.casts = unit_seconds(plan, self.cluster)
        self.travel: UnitTravel[_Moving] = UnitTravel(plan)

    def gather(self, unit: Unit, number: int) -> None:
        """Issue a round of gathering a unit."""
        if number == 0:
            cast = self.casts.get(unit.number, 0.0)
            self.streams.compute(f"unit {unit.number}", "cast parameters", cast)
        self.travel.gather(unit.number, number, lambda chain: self._begun(chain, back=False))

    def reduce(self, unit: Unit, number: int, micro_batch: int, *, last: bool) -> None:
        """Issue a round of reducing a unit's gradients."""
        self.travel.reduce(
            unit.number,
            number,
            micro_batch,
            last=last,
            begin=lambda chain: self._begun(chain, back=True),
        )

    def _begun(self, chain: Chain, *, back: bool) -> _Moving:
        key = (chain.group, chain.buckets, back)
        if key not in self.stretches:
            steps = self._group(chain.group, back=back) if chain.group else self._sums(chain)
            self.stretches[key] = self.streams.stretches(steps)
        # Ranks that take turns on a core hide nothing under computation.
        return _Moving(self.stretches[key], self.streams, blocks=back and not self.hides)

    def _group(self, group: tuple[int, ...], *, back: bool) -> Iterator[Sent]:
        first = self.program.steps[group[0]]
        assert isinstance(first, Redistribute)
        issuer = self.reductions if back else self.gathers
        for c in () if back else scale_messages(self.program, group):
            yield issuer.issue(c.kind, c.axes, c.nbytes, c.tensor)
        flat = flat_steps(self.plan, group, back=back) if first.gradient or not back else ()
        for step in flat:
            if step.kind:
                self._put_together(first.tensor, len(group))
            yield from self._sent(step, first.tensor, issuer)

    def _sums(self, chain: Chain) -> Iterator[Sent]:
        for bucket in chain.buckets:
            for axes in bucket.sums:
                if degree_of(axes, self.mesh) > 1:
                    name = bucket.parameters[0]
                    self._put_together(name, len(bucket.parameters))
                    self.streams.compute(name, "flatten", self._traffic([2.0 * bucket.nbytes]))
                    yield self.reductions.issue("all_reduce", axes, bucket.nbytes, name)

    def _sent(self, step: FlatStep, name: str, issuer: Issuer) -> Iterator[Sent]:
        """Play one step of a flat chain, with the copies into the message and out of it."""
        if step.kind:
            self.streams.compute(name, "flatten", self._traffic([step.traffic]))
            yield issuer.issue(step.kind, step.axes, step.nbytes, name)
            self.streams.compute(
                name, "unflatten", self._traffic([2.0 * size for size in step.copied])
            )

    def _put_together(self, name: str, parameters: int) -> None:
        """Play the host's work for a message of so many parameters."""
        self.streams.compute(name, "host", parameters * self.cluster.host_seconds("unit"))

    def _traffic(self, nbytes: Sequence[float]) -> float:
        """Seconds of kernels that each read and write so many bytes."""
        device = self.cluster.device
        return (
            float(with_launch(0.0, memory_seconds(np.array(nbytes), device), device).sum())
            if nbytes
            else 0.0
        )
