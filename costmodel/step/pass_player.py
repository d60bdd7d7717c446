"""The passes of a segment on the streams of a step, with their redistributions.

a redistribution   of values begins its first collective behind the computation before it; the
                   first reader of its result waits for it and for the rest of the chain.
                   Backward it begins behind that reader, and ends where it had begun
a layer of experts whose rows travel does so, too, and works in between (`travelling_rows.py`)
ring attention     sends a block while it attends to one
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from autopar.ir import Graph
from autopar.order.beside import Works, works_before
from autopar.order.scheduled import Scheduled, Segment
from autopar.order.value_flow import makes, reads
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import (
    Collective,
    Compute,
    Redistribute,
    chain_collectives,
    departure,
    operator_collectives,
    speaks,
)

from .covered import Covers, Moved, Seconds, Seen
from .issued_calls import Host
from .issuer import Issuer
from .streams import NOTHING, Sent, Work
from .travelling_rows import Exchanges


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


class _Covered(NamedTuple):
    """A redistribution whose messages run under products: what is seen of them, on which axes."""

    moved: Moved
    first: Collective


class _Work(NamedTuple):
    """An operator: its seconds, and the collectives inside it forward and backward.

    `issued`: seconds for which the host issues either pass. `rings`: whether either computes while
    it sends.
    """

    seconds: Seconds
    issued: tuple[float, float]
    ahead: list[Collective]
    back: list[Collective]
    rings: tuple[bool, bool]


class _Alone(NamedTuple):
    """Operators in a row beside which nothing is sent, forward and, the last first, backward."""

    ahead: list[Work]
    back: list[Work]


class _Step(NamedTuple):
    """A step: those under way whose results it reads, its number, and its operator, if any."""

    arriving: list[int]
    number: int
    operator: Compute | None


class _Script(NamedTuple):
    """The steps of a segment, which are the same in every micro-batch.

    `parts`: in the order of the forward pass. `read_by`: the redistributions and layers under way
    by the step that first reads their result (None: none does). `works`: the layers that work in
    front of each step. `apart`: those of them that leave in this segment, too.
    """

    parts: list[_Alone | _Step]
    read_by: dict[int | None, list[int]]
    works: Works
    apart: frozenset[int]


class PassPlayer:
    """Plays forward and backward passes; `seconds` gives those of an operator."""

    def __init__(
        self, plan: Scheduled, issuer: Issuer, seconds: Callable[[Compute], Seconds]
    ) -> None:
        self.issuer = issuer
        self.streams = issuer.streams
        self.seconds_of = seconds
        self.program = plan.program
        self.graph = plan.program.graph
        self.mesh = issuer.prices.mesh.shape
        self.gradients = plan.program.assignment.gradients
        self.host = Host(self.graph, self.mesh, issuer.prices.cluster)
        self.works: dict[str, _Work] = {}
        self.scripts: dict[tuple[int, ...], _Script] = {}
        self.exchanges: dict[tuple[int, int], Exchanges] = {}
        self.micro_batch = 0
        self.chains = {
            index: _Chain.of(self.graph, step, self.mesh)
            for index, step in enumerate(plan.program.steps)
            if isinstance(step, Redistribute) and index not in plan.modes
        }
        habits = issuer.prices.cluster.framework.habits
        covers = Covers.of(plan.program, habits, seconds)
        self.covered = {} if covers is None else self._under_products(covers)

    def _under_products(self, covers: Covers) -> dict[int, _Covered]:
        """The redistributions under products, whose chains send nothing by themselves."""
        covered = {}
        for index, chain in self.chains.items():
            step = self.program.steps[index]
            assert isinstance(step, Redistribute)
            ways = (chain.first_ahead + chain.ahead, chain.first_back + chain.back)
            if any(ways):
                first = next(collective for way in ways for collective in way)
                ahead, back = (sum(map(self.issuer.prices.collective, way)) for way in ways)
                moved = covers.moved(step, ahead, back, degree_of(first.axes, self.mesh))
                covered[index] = _Covered(moved, first)
                self.chains[index] = _Chain([], [], [], [])
        return covered

    def ahead(self, segment: Segment, micro_batch: int = 0) -> None:
        """Play the forward pass of a segment."""
        self.micro_batch = micro_batch
        self._stretch("forward", segment, self._ahead)

    def back(self, segment: Segment, micro_batch: int = 0) -> None:
        """Play a segment's backward pass, behind a second forward pass if it is recomputed."""
        self.micro_batch = micro_batch
        self._stretch("backward", segment, self._back)

    def _stretch(self, way: str, segment: Segment, play: Callable[[Segment], None]) -> None:
        apart = self._script(segment).works or segment.leaving or segment.arriving
        # Rows that travel between segments belong to a micro-batch: all else is alike in each.
        if apart or segment.working:
            play(segment)
        else:
            self.streams.stretch((way, segment.steps), lambda: play(segment))

    def _ahead(self, segment: Segment) -> None:
        travelling: dict[int, list[Sent]] = {}
        script = self._script(segment)
        for part in script.parts:
            if isinstance(part, _Alone):
                self.streams.compute_all(part.ahead)
                continue
            arriving, index, operator = part
            self._work_layers(script, index)
            for other in arriving:
                self._arrive(other, travelling)
            if index in script.apart:
                self._exchanges(index).leave()
            elif index in segment.working:
                continue
            elif operator is not None:
                self._forward(operator)
            else:
                if index in self.covered:
                    self._see(index, self.covered[index].moved.ahead)
                travelling[index] = self._departed(self.chains[index].first_ahead)
        self._work_layers(script, None)
        # Results that no step of this segment reads.
        for index in script.read_by[None]:
            self._arrive(index, travelling)
        for index in segment.leaving:
            self._exchanges(index).leave()

    def _arrive(self, index: int, travelling: dict[int, list[Sent]]) -> None:
        if index in self.chains:
            self._wait(travelling.pop(index))
            self.issuer.blocking(self.chains[index].ahead)
        else:
            self._exchanges(index).arrive()

    def _work_layers(self, script: _Script, index: int | None) -> None:
        for layer in script.works.get(index, ()):
            step = self._layer(layer)
            work = self._work(step)
            play = partial(self._computed, step, work.seconds.forward, work.issued[0])
            self._exchanges(layer).work(play)

    def _computed(self, step: Compute, seconds: float, issued: float) -> None:
        self.streams.compute(step.operator.name, step.operator.kind, seconds, issued)

    def _exchanges(self, index: int) -> Exchanges:
        """The exchanges of a layer in this micro-batch; those of others may be under way."""
        key = (index, self.micro_batch)
        if key not in self.exchanges:
            work = self._work(self._layer(index))
            self.exchanges[key] = Exchanges(self.issuer, work.ahead, work.back)
        return self.exchanges[key]

    def _layer(self, index: int) -> Compute:
        step = self.program.steps[index]
        assert isinstance(step, Compute)
        return step

    def _back(self, segment: Segment) -> None:
        if segment.recomputed:
            self._ahead(segment)
        for index in segment.leaving:
            self._exchanges(index).arrive()
        script = self._script(segment)
        travelling: dict[int, list[Sent]] = {}
        self._return(script, None, travelling)
        for part in reversed(script.parts):
            if isinstance(part, _Alone):
                self.streams.compute_all(part.back)
                continue
            _, index, operator = part
            if index in script.apart:
                self._exchanges(index).arrive()
            elif operator is not None and index not in segment.working:
                self._backward(operator)
            elif index in travelling:
                self._wait(travelling.pop(index))
                if index in self.covered:
                    self._see(index, self.covered[index].moved.repeated)
                    self._see(index, self.covered[index].moved.back)
            self._return(script, index, travelling)

    def _return(
        self, script: _Script, index: int | None, travelling: dict[int, list[Sent]]
    ) -> None:
        """Start what goes back from a step that has read it, then the work in front of the step."""
        for other in reversed(script.read_by.get(index, [])):
            if other in self.chains:
                travelling[other] = self._returned(other)
            else:
                self._exchanges(other).leave_back()
        for layer in reversed(script.works.get(index, [])):
            step = self._layer(layer)
            work = self._work(step)
            play = partial(self._computed, step, work.seconds.backward, work.issued[1])
            self._exchanges(layer).work_back(play)

    def _returned(self, index: int) -> list[Sent]:
        """Issue the collectives back to where a redistribution had begun.

        The gradients of its result are complete.
        """
        self.issuer.blocking(self.chains[index].back)
        return self._departed(self.chains[index].first_back)

    def _departed(self, collectives: Sequence[Collective]) -> list[Sent]:
        return [self.issuer.started(collective) for collective in collectives]

    def _see(self, index: int, seen: Seen) -> None:
        """Wait for what is seen of a redistribution, and send the rest under what follows."""
        first = self.covered[index].first
        self._wait([self.issuer.for_seconds(first, seen.waits)])
        self.issuer.for_seconds(first, seen.under)

    def _wait(self, coming: Sequence[Sent]) -> None:
        for sent in coming:
            self.streams.wait(sent)

    def _script(self, segment: Segment) -> _Script:
        if segment.steps not in self.scripts:
            works = works_before(self.program, segment.steps, segment.working)
            apart = frozenset(itertools.chain.from_iterable(works.values()))
            # What has left in the segment before works where it stands.
            works.update((index, [index]) for index in segment.working)
            script = _Script([], {}, works, apart)
            waiting = {makes(self.program.steps[i])[0]: i for i in segment.arriving}
            for index in segment.steps:
                step = self.program.steps[index]
                read = [waiting.pop(place) for place in reads(step) if place in waiting]
                operator = step if isinstance(step, Compute) else None
                if read:
                    script.read_by[index] = read
                if operator is None or read or index in works or index in apart:
                    script.parts.append(_Step(read, index, operator))
                else:
                    self._append(script.parts, _Step(read, index, operator))
                if isinstance(step, Redistribute) or index in script.apart:
                    waiting[makes(step)[0]] = index
            script.read_by[None] = list(waiting.values())
            self.scripts[segment.steps] = script
        return self.scripts[segment.steps]

    def _append(self, parts: list[_Alone | _Step], one: _Step) -> None:
        """Add an operator to those in front of it, if neither sends anything."""
        assert one.operator is not None
        work = self._work(one.operator)
        # One that sends in either pass stands by itself in both.
        if work.ahead or work.back:
            parts.append(one)
            return
        if not parts or not isinstance(parts[-1], _Alone):
            parts.append(_Alone([], []))
        alone = parts[-1]
        assert isinstance(alone, _Alone)
        operator = one.operator.operator
        ahead, back = work.issued
        alone.ahead.append(Work(operator.name, operator.kind, work.seconds.forward, ahead))
        # A backward pass runs the last operator first.
        alone.back.insert(0, Work(operator.name, operator.kind, work.seconds.backward, back))

    def _work(self, step: Compute) -> _Work:
        name = step.operator.name
        if name not in self.works:
            inside: list[Collective] = []
            if speaks(step):
                inside = list(operator_collectives(self.graph, step, self.mesh, self.gradients))
            ahead, back = (
                [c for c in inside if c.phase == phase] for phase in ("forward", "backward")
            )
            seconds = self.seconds_of(step)
            self.works[name] = _Work(
                seconds,
                self.host.issues(step, seconds),
                ahead,
                back,
                (_is_ring(step, ahead), _is_ring(step, back)),
            )
        return self.works[name]

    def _forward(self, step: Compute) -> None:
        streams = self.streams
        name = step.operator.name
        kind = step.operator.kind
        work = self._work(step)
        seconds = work.seconds.forward
        ahead = work.ahead
        if not work.rings[0]:
            self.issuer.blocking(ahead)
            streams.compute(name, kind, seconds, work.issued[0])
            return
        # A ring of n ranks sends n - 1 times, and computes on n blocks.
        share = seconds / (len(ahead) + 1)
        for collective in ahead:
            coming = self.issuer.started(collective)
            streams.compute(name, kind, share)
            streams.wait(coming)
        streams.compute(name, kind, share)

    def _backward(self, step: Compute) -> None:
        work = self._work(step)
        if work.rings[1]:
            self._backward_ring(step, work.back, work.seconds.backward)
            return
        self.issuer.blocking(work.back)
        operator = step.operator
        self.streams.compute(operator.name, operator.kind, work.seconds.backward, work.issued[1])

    def _backward_ring(self, step: Compute, back: list[Collective], seconds: float) -> None:
        """Play the rounds of a ring backward.

        Each sends the next keys and values on, computes, and sends the gradients so far after them.
        """
        streams = self.streams
        rounds = (len(back) + 1) // 2
        travelling = coming = NOTHING
        for number in range(rounds):
            last = number == rounds - 1
            # In the last round all keys and values have come by: only gradients still travel.
            coming = coming if last else self.issuer.started(back[2 * number])
            streams.compute(step.operator.name, step.operator.kind, seconds / rounds)
            streams.wait(travelling)
            travelling = self.issuer.started(back[-1] if last else back[2 * number + 1])
            streams.wait(coming)
        streams.wait(travelling)


def _is_ring(step: Compute, inside: list[Collective]) -> bool:
    """Whether an operator computes while it sends around a ring."""
    return (
        bool(inside)
        and all(c.kind == "send" for c in inside)
        and any(o.communication == "ring" for o in step.decision.options)
    )
