"""The parameters' collectives once a step, and their exposed seconds: the same rule with and without stages.

    seen(t, pass) = t / n + max(t (1 - 1 / n) - pass, 0) + (slowdown - 1) min(t (1 - 1 / n), pass)

A device gathers its n units before its first forward pass, and reduces their gradients in its last backward pass. t:
seconds of all gathers, or of all reductions. The first gather and the last reduction have nothing to run under. The
others run under the pass, and slow it down. With stages, device d waits for its first micro-batch while earlier devices
compute, and finishes its last one that much earlier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.costmodel import Cluster
from autopar.costmodel.step.host_share import hides
from autopar.costmodel.step.pricing import MeshPrices
from autopar.costmodel.step.timeline import SLOWDOWN
from autopar.search import Solution

from .multiplicities import Multiplicities
from .tables import Tables, Variable

FORWARD = 1 / 3
"""The forward share of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """Seconds of one device: a micro-batch's `forward` and `backward` pass, all gathers and reductions, the `update`.

    `units`: the number of units in which the parameters travel.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    update: float
    units: int

    @property
    def hidden(self) -> float:
        """Seconds of gathers and reductions that run under the passes."""
        rest = 1 - 1 / self.units
        return min(self.gather * rest, self.forward) + min(self.reduce * rest, self.backward)

    def busy(self, micro_batches: int) -> float:
        """Seconds of all work in a step of so many micro-batches."""
        return micro_batches * (self.forward + self.backward) + self.gather + self.reduce + self.update

    def gather_seen(self, slowdown: float) -> float:
        """The exposed seconds of the gathers."""
        return _seen(self.gather, self.forward, self.units, slowdown)

    def reduce_seen(self, slowdown: float) -> float:
        """The exposed seconds of the reductions."""
        return _seen(self.reduce, self.backward, self.units, slowdown)


def units_of(nbytes: float, unit_bytes: float, cluster: Cluster) -> int:
    """The number of units of so many bytes of parameters; a single one, which nothing hides, if ranks share cores."""
    return max(math.ceil(nbytes / unit_bytes), 1) if hides(cluster) else 1


def hideable(prices: MeshPrices, parameters: float) -> float:
    """The share of the parameters' collectives that costs nothing, as it runs under computation.

        (1 - 1 / n - (slowdown - 1)) / k        n: units, k: axes

    `parameters`: their bytes. In a chain over several axes only the first collective runs under computation, because
    the next ones begin when the unit is waited for.
    """
    axes = sum(axis.size > 1 for axis in prices.mesh.axes)
    alone = 1 / units_of(parameters, prices.unit_bytes, prices.cluster) + SLOWDOWN[prices.cluster.backend] - 1
    return max((1 - alone) / axes, 0.0) if axes else 0.0


def most_hideable(prices: MeshPrices) -> float:
    """The largest possible share of the parameters' collectives that costs nothing.

    During communication the computation loses 1 - 1 / slowdown of every second. At most k axes communicate at once.
    """
    if not hides(prices.cluster):
        return 0.0
    axes = sum(axis.size > 1 for axis in prices.mesh.axes)
    return 1 - (1 - 1 / SLOWDOWN[prices.cluster.backend]) / max(axes, 1)


def exposed_seconds(tables: Tables, solution: Solution, work: Multiplicities, hideable: float) -> float:
    """Exposed seconds of the parameters' collectives that a solution's tables leave out as hidden.

    Of the `hideable` share, half is gathers, which the forward pass hides, and half is reductions, which the backward
    pass hides; a pass may be too short for its half.
    """
    choices, sent = solution.choices, sent_seconds(tables, solution, work)
    pairs = zip(tables.variables, tables.graph.unary, choices, strict=True)
    computed = math.fsum(float(unary[choice]) for v, unary, choice in pairs if v.what == "operator")
    half = 0.5 * hideable * sent
    seen = max(half - FORWARD * computed, 0.0) + max(half - (1 - FORWARD) * computed, 0.0)
    return (work.hidden - hideable) * sent + seen


def sent_seconds(tables: Tables, solution: Solution, work: Multiplicities) -> float:
    """Seconds of a solution's collectives of parameters, including the share that its tables leave out."""
    choices, edges = solution.choices, tables.graph.edges
    told = (
        float(edges[u, v][choices[u], choices[v]] - aside[choices[u], choices[v]])
        for (u, v), aside in tables.aside.items()
        if _is_hidden(tables.variables[u], tables.variables[v], work)
    )
    return math.fsum(told) / (1 - work.hidden)


def _is_hidden(source: Variable, target: Variable, work: Multiplicities) -> bool:
    """Whether the tables leave out a share of the parameter's collectives on this edge."""
    return work.hidden_of(source.name, None if source.what == "parameter" else target.name) > 0


def once_seconds(devices: Iterable[Once], backend: str, interleave: int = 1) -> float:
    """The exposed seconds of gathers, reductions and updates; `devices`: in the order of their stages."""
    # A device's gathers also run while earlier devices pass their first micro-batch forward (`passed`), its reductions
    # while these devices pass their last one backward (`finished`).
    slowdown, before, behind, passed, finished = SLOWDOWN[backend], 0.0, 0.0, 0.0, 0.0
    for device in devices:
        before = max(before, device.gather_seen(slowdown) - passed)
        behind = max(behind, device.reduce_seen(slowdown) + device.update - finished)
        passed += device.forward / interleave
        finished += device.backward / interleave
    return before + behind


def _seen(seconds: float, cover: float, units: int, slowdown: float) -> float:
    # One unit is always exposed; of the others, what exceeds the pass.
    rest = seconds * (1 - 1 / units)
    hidden = min(rest, cover)
    return seconds - hidden + (slowdown - 1) * hidden
