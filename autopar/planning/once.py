"""What a stage sends of its parameters once a step, and how much of that is seen: the rule of a plan without stages.

A device gathers its units before its first forward pass and reduces their gradients in its last backward pass. Of n units, one has nothing
left to run under, the first that is gathered and the last that is reduced; the others run under that pass, which takes the longer for it:

    seen(t, pass) = t / n + max(t (1 - 1 / n) - pass, 0) + (slowdown - 1) min(t (1 - 1 / n), pass)

Device d waits for its first micro-batch while the devices before it compute, and has done its last one so much earlier than these.
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

from .tables import Tables, Variable
from .work import Work

FORWARD = 1 / 3
"""Share of a pass that its forward half takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """Of one device: seconds of a micro-batch's `forward` and `backward` pass, of all gathers and reductions, in so many `units`, and of
    the `update`."""

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
        """Seconds of all its work in a step of so many micro-batches."""
        return micro_batches * (self.forward + self.backward) + self.gather + self.reduce + self.update

    def gather_seen(self, slowdown: float) -> float:
        """By how much gathers make the step longer."""
        return _seen(self.gather, self.forward, self.units, slowdown)

    def reduce_seen(self, slowdown: float) -> float:
        """By how much reductions do."""
        return _seen(self.reduce, self.backward, self.units, slowdown)


def units_of(nbytes: float, unit_bytes: float, cluster: Cluster) -> int:
    """In how many units so many bytes of parameters travel; in one, which nothing hides, where ranks share cores."""
    return max(math.ceil(nbytes / unit_bytes), 1) if hides(cluster) else 1


def hideable(prices: MeshPrices, parameters: float) -> float:
    """The share of the collectives of so many bytes of parameters that can run under computation, at no cost to it.

        (1 - 1 / n - (slowdown - 1)) / k        n: units, k: axes

    Of a chain over several axes only the first collective runs beside the computation: the next ones are begun when the unit is waited for.
    """
    axes = sum(axis.size > 1 for axis in prices.mesh.axes)
    alone = 1 / units_of(parameters, prices.unit_bytes, prices.cluster) + SLOWDOWN[prices.cluster.backend] - 1
    return max((1 - alone) / axes, 0.0) if axes else 0.0


def most_hideable(prices: MeshPrices) -> float:
    """The share of the collectives of parameters of which, at the best, nothing is seen.

    While anything is sent the computation is so much slower that of every second 1 - 1 / slowdown are lost; k axes send at once at most.
    """
    if not hides(prices.cluster):
        return 0.0
    axes = sum(axis.size > 1 for axis in prices.mesh.axes)
    return 1 - (1 - 1 / SLOWDOWN[prices.cluster.backend]) / max(axes, 1)


def exposed_seconds(tables: Tables, solution: Solution, work: Work, hideable: float) -> float:
    """By how much the step of a solution is longer than its tables' sum, which leave out a share of parameters' collectives.

    Of the share that is `hideable` some finds nothing to run under: half of it is gathers, for the forward pass, half is reductions.
    """
    choices, sent = solution.choices, sent_seconds(tables, solution, work)
    pairs = zip(tables.variables, tables.graph.unary, choices, strict=True)
    computed = math.fsum(float(unary[choice]) for v, unary, choice in pairs if v.what == "operator")
    half = 0.5 * hideable * sent
    seen = max(half - FORWARD * computed, 0.0) + max(half - (1 - FORWARD) * computed, 0.0)
    return (work.hidden - hideable) * sent + seen


def sent_seconds(tables: Tables, solution: Solution, work: Work) -> float:
    """Seconds of the collectives of parameters of a solution whose tables leave out a share of them."""
    choices, edges = solution.choices, tables.graph.edges
    told = (
        float(edges[u, v][choices[u], choices[v]] - aside[choices[u], choices[v]])
        for (u, v), aside in tables.aside.items()
        if _is_hidden(tables.variables[u], tables.variables[v], work)
    )
    return math.fsum(told) / (1 - work.hidden)


def _is_hidden(source: Variable, target: Variable, work: Work) -> bool:
    """Whether tables leave out a share of what a parameter sends on this edge."""
    return work.hidden_of(source.name, None if source.what == "parameter" else target.name) > 0


def once_seconds(devices: Iterable[Once], backend: str, interleave: int = 1) -> float:
    """By how much gathers, reductions and updates make a step longer than its passes; the devices in the order of their stages."""
    slowdown, before, behind, passed, finished = SLOWDOWN[backend], 0.0, 0.0, 0.0, 0.0
    for device in devices:
        before = max(before, device.gather_seen(slowdown) - passed)
        behind = max(behind, device.reduce_seen(slowdown) + device.update - finished)
        passed += device.forward / interleave
        finished += device.backward / interleave
    return before + behind


def _seen(seconds: float, cover: float, units: int, slowdown: float) -> float:
    rest = seconds * (1 - 1 / units)
    hidden = min(rest, cover)
    return seconds - hidden + (slowdown - 1) * hidden
