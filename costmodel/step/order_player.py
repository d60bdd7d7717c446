"""Plays the actions of a step's order on streams, as the runtime issues them.

The computation is one stream, the collectives of each process group another: over a mesh axis or
over several, values and parameters have groups of their own. A task starts when its stream is free
and the tasks that it waits for have ended; `pass_player.py` has operators and redistributions,
`unit_player.py` units of parameters.
Behind the backward pass of a segment the gradients that it completes are cast, and added to those
of earlier micro-batches in three passes over them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping

from autopar.order.actions import Action, Word
from autopar.order.passes import phases
from autopar.order.scheduled import Scheduled
from autopar.sharding.program import Compute, Redistribute

from .casts import adding_of_gradients, cast_of_gradients
from .covered import Seconds
from .issuer import Issuer
from .mesh_prices import MeshPrices
from .pass_player import PassPlayer
from .reasons import Reason
from .streams import Streams
from .unit_player import UnitPlayer


class Player:
    """Issues the tasks of a step on `streams`.

    `hides`: gradients are reduced under the backward pass.
    """

    def __init__(
        self,
        plan: Scheduled,
        prices: MeshPrices,
        seconds: Callable[[Compute], Seconds],
        streams: Streams,
        *,
        hides: bool,
    ) -> None:
        self.plan = plan
        self.prices = prices
        self.streams = streams
        self.units = UnitPlayer(plan, prices, streams, hides=hides)
        self.passes = PassPlayer(plan, Issuer(prices, streams, Reason.VALUES), seconds)
        gradients = plan.program.assignment.gradients
        cluster = prices.cluster
        # Where the host computes, its own work for an action is computation like any other.
        self.host = cluster.host_seconds
        self.casts = self._by_segment(cast_of_gradients(plan, gradients, cluster))
        self.sums = self._by_segment(adding_of_gradients(plan, gradients, cluster))
        trained = [t.name for t in plan.program.graph.parameters if t.name in gradients]
        self.taken = self._by_segment(dict.fromkeys(trained, self.host("gradient")))

    def _by_segment(self, seconds: Mapping[str, float]) -> list[float]:
        """Add up seconds of parameters by the segment whose backward pass completes them.

        Those of no segment count to the first.
        """
        plan = self.plan
        sums = [0.0] * len(self.plan.segments)
        complete = plan.reduced_at()
        steps = plan.program.steps
        of_tensor = {
            step.tensor: complete[u.number]
            for u in plan.units
            for i in u.members
            if isinstance(step := steps[i], Redistribute)
        }
        for name, taken in seconds.items():
            sums[of_tensor.get(name, 0)] += taken
        return sums

    def play(self, count: int) -> None:
        """Play a step of `count` micro-batches.

        Those beyond the plan's schedule take as long as its last but one.
        """
        streams = self.streams
        played = self.plan.schedule.micro_batches
        streams.compute("step", "host", self.host("step"))
        for number, actions in enumerate(self._micro_batches()):
            streams.mark()
            for action, streams.phase in actions:
                self._do(action)
            # All micro-batches that are not played take as long as this one.
            if number == played - 2 and count > played:
                streams.repeat(count - played)
        # From here on no pass is left under which anything could hide.
        streams.ends = True
        self.units.travel.settle()
        streams.finish()

    def _micro_batches(self) -> Iterator[list[tuple[Action, str]]]:
        """The actions of each micro-batch, up to the first of the next one, with their phases."""
        actions = self.plan.actions()
        number = 0

        # Actions of units lie between passes: they count to the forward pass that began last.
        def micro_batch(pair: tuple[Action, str]) -> int:
            nonlocal number
            number = (
                max(number, pair[0].micro_batch or 0) if pair[0].word is Word.FORWARD else number
            )
            return number

        return (
            list(group)
            for _, group in itertools.groupby(
                zip(actions, phases(actions), strict=True), micro_batch
            )
        )

    def _do(self, action: Action) -> None:
        segments = self.plan.segments
        units = self.plan.units
        match action.word:
            case Word.GATHER:
                assert action.unit is not None and action.round is not None
                self.units.gather(units[action.unit], action.round)
            case Word.RELEASE:
                assert action.unit is not None
                # Nothing is released before it has come, even if no segment read it.
                self.units.travel.wait([action.unit])
            case Word.FORWARD:
                assert action.segment is not None
                self.units.travel.wait(segments[action.segment].units)
                self.streams.compute(str(action), "host", self.host("pass"))
                self.passes.ahead(segments[action.segment], action.micro_batch or 0)
            case Word.BACKWARD:
                assert action.segment is not None
                self.units.travel.wait(segments[action.segment].wanted)
                self.streams.compute(str(action), "host", self.host("pass"))
                self.passes.back(segments[action.segment], action.micro_batch or 0)
                self.streams.compute("gradients", "host", self.taken[action.segment])
                self.streams.compute("gradients", "cast", self.casts[action.segment])
                self.streams.compute(
                    "gradients",
                    "accumulation",
                    # The first micro-batch has nothing to add to.
                    self.sums[action.segment] if action.micro_batch else 0.0,
                )
            case Word.REDUCE:
                assert action.unit is not None
                assert action.round is not None and action.micro_batch is not None
                self.units.reduce(
                    units[action.unit],
                    action.round,
                    action.micro_batch,
                    last=action.micro_batch == self.plan.schedule.micro_batches - 1,
                )
