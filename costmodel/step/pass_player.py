"""The passes of a segment on the streams of a step, with their redistributions.

a redistribution   of values begins its first collective behind the computation before it; the
                   first reader of its result waits for it and for the rest of the chain.
                   Backward it begins behind that reader, and ends where it had begun
ring attention     sends a block while it attends to one
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from autopar.ir import Graph
from autopar.order.scheduled import Scheduled, Segment
from autopar.order.value_flow import PlacedValue, makes, reads
from autopar.sharding.program import (
    Collective,
    Compute,
    Redistribute,
    chain_collectives,
    departure,
    operator_collectives,
    speaks,
)

from .issuer import Issuer
from .shared_links import Sent


class Seconds(NamedTuple):
    """Seconds of an operator.

    `weight` is the part of `backward` that makes the gradients of parameters.
    """

    forward: float
    backward: float
    weight: float = 0.0


class _Chain(NamedTuple):
    """The collectives of a redistribution: of the departing step and of those behind it.

    Backward ones are in order of issue.
    """

    first_ahead: list[Collective]
    ahead: list[Collective]
    first_back: list[Collective]
    back: list[Collective]

    @classmethod
    def of(cls, graph: Graph, step: Redistribute, mesh: Sequence[int]) -> _Chain:
        # Steps before the first collective are local, and take no time on a stream.
        number = departure(step, mesh) or 0
        ahead, back = chain_collectives(
            graph, replace(step, chain=step.chain[number : number + 2]), mesh
        )
        more_ahead, more_back = chain_collectives(
            graph, replace(step, chain=step.chain[number + 1 :]), mesh
        )
        return cls(ahead, more_ahead, back, more_back[::-1])


class _Work(NamedTuple):
    """An operator: its seconds, and the collectives inside it forward and backward.

    `rings`: whether either pass computes while it sends.
    """

    seconds: Seconds
    ahead: list[Collective]
    back: list[Collective]
    rings: tuple[bool, bool]


class _Script(NamedTuple):
    """The steps of a segment, which are the same in every micro-batch.

    `ahead`: in the order of the forward pass, the redistributions whose results a step reads, its
    number, and its operator if it is one. `read_by`: redistributions by the step that first reads
    their result (None: none does).
    """

    ahead: list[tuple[list[int], int, Compute | None]]
    read_by: dict[int | None, list[int]]


class PassPlayer:
    """Plays forward and backward passes; `seconds` gives those of an operator."""

    def __init__(
        self, plan: Scheduled, issuer: Issuer, seconds: Callable[[Compute], Seconds]
    ) -> None:
        self.issuer = issuer
        self.clock = issuer.clock
        self.seconds_of = seconds
        self.program = plan.program
        self.graph = plan.program.graph
        self.mesh = issuer.prices.mesh.shape
        self.gradients = plan.program.assignment.gradients
        self.works: dict[str, _Work] = {}
        self.scripts: dict[tuple[int, ...], _Script] = {}
        self.chains = {
            index: _Chain.of(self.graph, step, self.mesh)
            for index, step in enumerate(plan.program.steps)
            if isinstance(step, Redistribute) and index not in plan.modes
        }

    def ahead(self, segment: Segment) -> None:
        """Play the forward pass of a segment."""
        travelling: dict[int, list[Sent]] = {}
        for arriving, index, operator in self._script(segment).ahead:
            for other in arriving:
                self._arrive(other, travelling.pop(other))
            if operator is not None:
                self._forward(operator)
            else:
                travelling[index] = self._departed(self.chains[index].first_ahead)
        # Results that no step of this segment reads.
        for index, coming in travelling.items():
            self._arrive(index, coming)

    def _arrive(self, index: int, coming: Sequence[Sent]) -> None:
        self._wait(coming)
        self.issuer.blocking(self.chains[index].ahead)

    def back(self, segment: Segment) -> None:
        """Play a segment's backward pass, behind a second forward pass if it is recomputed."""
        if segment.recomputed:
            self.ahead(segment)
        script = self._script(segment)
        travelling = {
            index: self._returned(index) for index in reversed(script.read_by.get(None, []))
        }
        for _, index, operator in reversed(script.ahead):
            if operator is not None:
                self._backward(operator)
            else:
                self._wait(travelling.pop(index))
            travelling.update(
                (other, self._returned(other)) for other in reversed(script.read_by.get(index, []))
            )

    def _returned(self, index: int) -> list[Sent]:
        """Issue the collectives back to where a redistribution had begun.

        The gradients of its result are complete.
        """
        self.issuer.blocking(self.chains[index].back)
        return self._departed(self.chains[index].first_back)

    def _departed(self, collectives: Sequence[Collective]) -> list[Sent]:
        return [self.issuer.started(collective) for collective in collectives]

    def _wait(self, coming: Sequence[Sent]) -> None:
        for sent in coming:
            self.clock.wait(sent)

    def _script(self, segment: Segment) -> _Script:
        if segment.steps not in self.scripts:
            script = _Script([], {})
            waiting = dict[PlacedValue, int]()
            for index in segment.steps:
                step = self.program.steps[index]
                read = [waiting.pop(place) for place in reads(step) if place in waiting]
                script.ahead.append((read, index, step if isinstance(step, Compute) else None))
                if read:
                    script.read_by[index] = read
                if isinstance(step, Redistribute):
                    waiting[makes(step)[0]] = index
            script.read_by[None] = list(waiting.values())
            self.scripts[segment.steps] = script
        return self.scripts[segment.steps]

    def _work(self, step: Compute) -> _Work:
        name = step.operator.name
        if name not in self.works:
            inside: list[Collective] = []
            if speaks(step):
                inside = list(operator_collectives(self.graph, step, self.mesh, self.gradients))
            ahead, back = (
                [c for c in inside if c.phase == phase] for phase in ("forward", "backward")
            )
            self.works[name] = _Work(
                self.seconds_of(step), ahead, back, (_is_ring(step, ahead), _is_ring(step, back))
            )
        return self.works[name]

    def _forward(self, step: Compute) -> None:
        clock = self.clock
        name = step.operator.name
        kind = step.operator.kind
        work = self._work(step)
        seconds = work.seconds.forward
        ahead = work.ahead
        if not work.rings[0]:
            self.issuer.blocking(ahead)
            clock.compute(name, kind, seconds)
            return
        # A ring of n ranks sends n - 1 times, and computes on n blocks.
        share = seconds / (len(ahead) + 1)
        for collective in ahead:
            coming = self.issuer.started(collective)
            clock.compute(name, kind, share)
            clock.wait(coming)
        clock.compute(name, kind, share)

    def _backward(self, step: Compute) -> None:
        work = self._work(step)
        if work.rings[1]:
            self._backward_ring(step, work.back, work.seconds.backward)
            return
        self.issuer.blocking(work.back)
        self.clock.compute(step.operator.name, step.operator.kind, work.seconds.backward)

    def _backward_ring(self, step: Compute, back: list[Collective], seconds: float) -> None:
        """Play the rounds of a ring backward.

        Each sends the next keys and values on, computes, and sends the gradients so far after them.
        """
        clock = self.clock
        rounds = (len(back) + 1) // 2
        travelling = coming = Sent(0.0, 0.0)
        for number in range(rounds):
            last = number == rounds - 1
            # In the last round all keys and values have come by: only gradients still travel.
            coming = coming if last else self.issuer.started(back[2 * number])
            clock.compute(step.operator.name, step.operator.kind, seconds / rounds)
            clock.wait(travelling)
            travelling = self.issuer.started(back[-1] if last else back[2 * number + 1])
            clock.wait(coming)
        clock.wait(travelling)


def _is_ring(step: Compute, inside: list[Collective]) -> bool:
    """Whether an operator computes while it sends around a ring."""
    return (
        bool(inside)
        and all(c.kind == "send" for c in inside)
        and any(o.communication == "ring" for o in step.decision.options)
    )
