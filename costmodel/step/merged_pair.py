"""The seconds that two passes take less where they are merged, each under the other's exchanges.

A forward pass and the backward pass of another micro-batch are played on the streams of a device,
one after the other and merged. The difference is dealt out to the layers of experts that are apart,
by the seconds of their exchanges, so that a stage that holds some of them hides their shares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

from autopar.order.actions import Action, Word
from autopar.order.beside import travels
from autopar.order.passes import Passes, expand
from autopar.order.scheduled import Scheduled, scheduled
from autopar.sharding.analysis import Analysis
from autopar.sharding.program import Compute, Program, operator_collectives
from autopar.sharding.schedule import Schedule

from .covered import SLOWDOWN, Seconds
from .estimate import seconds_of_steps
from .issuer import Issuer
from .mesh_prices import MeshPrices
from .pass_player import PassPlayer
from .reasons import Reason
from .shared_cores import hides
from .streams import Streams

AHEAD = Action(word=Word.FORWARD, micro_batch=1)
BACK = Action(word=Word.BACKWARD, micro_batch=0)


def hidden_by_layer(
    program: Program, analysis: Analysis, prices: MeshPrices, schedule: Schedule
) -> Mapping[str, float]:
    """Seconds that merging saves of a micro-batch's passes, by the name of the layer of experts.

    Where a rank has no core of its own nothing hides.
    """
    mesh = prices.mesh.shape
    if not hides(prices.cluster) or not any(travels(step, mesh) for step in program.steps):
        return {}
    alone, merged = (
        scheduled(program, replace(schedule, micro_batches=2, overlap_experts=merges))
        for merges in (False, True)
    )
    exchanged = {
        step.operator.name: math.fsum(
            prices.collective(c)
            for c in operator_collectives(program.graph, step, mesh, program.assignment.gradients)
        )
        for segment in merged.segments
        for index in segment.working
        # Casts are steps of the scheduled program alone.
        if isinstance(step := merged.program.steps[index], Compute)
    }
    seconds = seconds_of_steps(analysis, prices)
    slowdown = SLOWDOWN[prices.cluster.backend]
    before = passes_seconds(alone, prices, seconds, [AHEAD, BACK], slowdown)
    saved = before - passes_seconds(merged, prices, seconds, [(AHEAD, BACK)], slowdown)
    total = math.fsum(exchanged.values())
    # What is slowed down by the exchanges may be more than what they hide.
    return {name: max(saved, 0.0) * own / total for name, own in exchanged.items() if total}


def passes_seconds(
    plan: Scheduled,
    prices: MeshPrices,
    seconds: Callable[[Compute], Seconds],
    passes: Passes,
    slowdown: float,
) -> float:
    """Seconds of passes played one after the other, without what is done to parameters.

    `slowdown`: factor on the seconds of computation while anything is sent.
    """
    groups = plan.value_groups()
    uses = {prices.mesh.name(axes): prices.uses(axes) for axes in sorted(groups)}
    streams = Streams(slowdown, uses)
    player = PassPlayer(plan, Issuer(prices, streams, Reason.VALUES), seconds)
    for action in expand({0: plan}, passes, prefetch=plan.schedule.prefetch):
        # Those of units have no segment.
        if action.segment is not None:
            play = player.ahead if action.word is Word.FORWARD else player.back
            play(plan.segments[action.segment], action.micro_batch or 0)
    return streams.play().now
