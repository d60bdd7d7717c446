"""Plays the actions of a step's order on streams, as the runtime issues them.

The computation is one stream, the collectives of each mesh axis, or of several, another (a process group has a stream). A task starts
when its stream is free and the tasks that it waits for have ended; `pass_player.py` has operators and redistributions,
`unit_player.py` units of parameters. Gradients are added to those of earlier micro-batches in three passes over them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

from autopar.order.actions import Action, Word
from autopar.order.passes import phases
from autopar.order.scheduled import Scheduled
from autopar.sharding.program import Compute

from .casts import adding_seconds, gradient_seconds
from .issuing import Issuer
from .pass_player import PassPlayer, Seconds
from .pricing import MeshPrices
from .streams import Clock
from .unit_player import UnitPlayer


class Player:
    """Issues the tasks of a step on the streams of `clock`; `hides`: gradients are reduced under the backward pass."""

    def __init__(self, plan: Scheduled, prices: MeshPrices, seconds: Callable[[Compute], Seconds], clock: Clock, *, hides: bool) -> None:
        self.plan, self.prices, self.clock = plan, prices, clock
        issuer = Issuer(prices, clock)
        self.units, self.passes = UnitPlayer(plan, issuer, hides=hides), PassPlayer(plan, issuer, seconds)
        self.gradients = plan.program.assignment.gradients

    def play(self, count: int) -> None:
        """Play a step of `count` micro-batches; those beyond the plan's schedule take as long as its last but one."""
        clock, played = self.clock, self.plan.schedule.micro_batches
        accumulation = adding_seconds(self.plan, self.gradients, self.prices.cluster) if count > 1 else 0.0
        cast, _ = gradient_seconds(self.plan, self.gradients, self.prices.cluster)
        for number, actions in enumerate(self._micro_batches()):
            start, spent, sent = clock.now, dict(clock.spent), len(clock.sent)
            for action, clock.phase in actions:
                self._do(action)
            clock.compute("gradients", "cast", cast)
            if number:
                clock.compute("gradients", "accumulation", accumulation)
            if number == played - 2 and count > played:
                more, left = clock.now - start, count - played
                clock.skip(left * more, {p: left * (clock.spent[p] - spent[p]) for p in spent}, left * math.fsum(clock.sent[sent:]))
        self.units.settle()
        clock.wait(max(clock.free.values(), default=0.0))

    def _micro_batches(self) -> Iterator[list[tuple[Action, str]]]:
        """The actions of each micro-batch, up to the first of the next one, with their phases."""
        actions = self.plan.actions()
        number = 0

        def micro_batch(pair: tuple[Action, str]) -> int:
            nonlocal number
            number = max(number, pair[0].micro_batch or 0) if pair[0].word is Word.FORWARD else number
            return number

        return (list(group) for _, group in itertools.groupby(zip(actions, phases(actions), strict=True), micro_batch))

    def _do(self, action: Action) -> None:
        segments, units = self.plan.segments, self.plan.units
        match action.word:
            case Word.GATHER:
                assert action.unit is not None
                self.units.gather(units[action.unit])
            case Word.RELEASE:
                assert action.unit is not None
                self.units.wait([action.unit])
            case Word.FORWARD:
                assert action.segment is not None
                self.units.wait(segments[action.segment].units)
                self.passes.ahead(segments[action.segment])
            case Word.BACKWARD:
                assert action.segment is not None
                self.units.wait(segments[action.segment].wanted)
                self.passes.back(segments[action.segment])
            case Word.REDUCE:
                assert action.unit is not None
                self.units.reduce(units[action.unit], last=action.micro_batch == self.plan.schedule.micro_batches - 1)
