"""The timeline of a step on one rank: the actions of its order, played on streams.

    step = forward + backward + update + communication - hidden

`order_player` decides what overlaps. Under a schedule with micro-batches the program is that of one
of them, and played for each; those between the third and the last take the same time, which is
added up, not played.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from autopar.order.owners import program_owners
from autopar.order.scheduled import Scheduled
from autopar.sharding.program import Compute

from .casts import gradient_seconds
from .covered import Seconds
from .issuer import PARAMETERS
from .matrix_updates import play_owners
from .mesh_prices import MeshPrices
from .order_player import Player
from .streams import Event, Played, Streams, Wait

ROUNDING = 1e-12
"""Hidden seconds below this share of the step are rounding."""
PLAYED = 4
"""Micro-batches that are played: the first two, one in place of all between, and the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Communication that runs under computation.

    `gradients`: their reduction. `prefetch`: gathers of parameters. `slowdown`: factor on the
    seconds of computation while anything is sent.
    """

    gradients: bool = True
    prefetch: bool = True
    slowdown: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Seconds of computation by phase, of all collectives, and of the step.

    Some collectives are hidden in the step; for others computation `waits`, and all of them slow it
    down (`slowed`), by as much as the step is longer than the computation.
    """

    forward: float
    backward: float
    update: float
    communication: float
    step: float
    slowed: float
    played: Played = field(repr=False)

    @property
    def waits(self) -> tuple[Wait, ...]:
        """The waits of computation, in their order."""
        return self.played.waits

    @property
    def events(self) -> tuple[Event, ...]:
        """Computations and transfers in the order of issue."""
        return self.played.events

    @property
    def hidden(self) -> float:
        """Seconds of communication that do not lengthen the step."""
        hidden = self.forward + self.backward + self.update + self.communication - self.step
        return hidden if hidden > ROUNDING * self.step else 0.0


def step_timeline(
    plan: Scheduled,
    prices: MeshPrices,
    seconds: Callable[[Compute], Seconds],
    *,
    update: float = 0.0,
    overlap: Overlap | None = None,
) -> Timeline:
    """Play the order of a step; then the optimizer computes for `update` seconds.

    Owners of whole matrices work behind that. Under a schedule with micro-batches the program is
    that of one of them.
    """
    schedule = plan.schedule
    habits = overlap or Overlap()
    played = replace(
        schedule,
        micro_batches=min(schedule.micro_batches, PLAYED),
        prefetch=schedule.prefetch if habits.prefetch else 0,
    )
    values = plan.value_groups()
    units = plan.unit_groups()
    uses = {prices.mesh.name(axes): prices.uses(axes) for axes in sorted(values | units)}
    # Parameters have a group of their own where values travel as well.
    uses |= {
        prices.mesh.name(axes) + PARAMETERS: prices.uses(axes) for axes in sorted(values & units)
    }
    blocking = prices.cluster.framework.habits.blocking
    streams = Streams(habits.slowdown, uses, blocking=blocking)
    Player(replace(plan, schedule=played), prices, seconds, streams, hides=habits.gradients).play(
        schedule.micro_batches
    )
    streams.phase = "update"
    _, home = gradient_seconds(plan, plan.program.assignment.gradients, prices.cluster)
    streams.compute("optimizer", "update", update + home)
    if plan.updates_whole:
        play_owners(program_owners(plan.program), prices, streams)
    result = streams.play()
    return Timeline(
        **result.spent,
        communication=result.communication,
        step=result.now,
        slowed=result.slowed,
        played=result,
    )
