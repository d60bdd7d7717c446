"""The parameters' collectives once a step, and their exposed seconds: the same rule with and without stages.

    seen(t, pass) = t / n + max(t (1 - 1 / n) - pass, (1 - 1 / slowdown) t (1 - 1 / n))

A device gathers its n units before its first forward pass, and reduces their gradients in its last backward pass. t:
seconds of all gathers, or of all reductions. The first gather and the last reduction have nothing to run under. The
others run under the pass, which does 1 / slowdown of its work while anything is sent. With stages, device d waits for
its first micro-batch while earlier devices compute, and finishes its last one that much earlier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.costmodel import Cluster
from autopar.costmodel.step.host_share import hides
from autopar.costmodel.step.pricing import MeshPrices
from autopar.costmodel.step.timeline import SLOWDOWN
from autopar.search import Solution

from ..ir import Tensor
from .multiplicities import Multiplicities
from .parameter_messages import messages
from .tables import Tables

FORWARD = 1 / 3
"""The forward share of a pass."""
OUTERMOST = 0.9
"""What the seconds of the outermost link count in a bound, those of all others the rest: most is sent there."""


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


def hideable(prices: MeshPrices, parameters: float, work: Multiplicities, tensors: Mapping[str, Tensor], stages: int = 1) -> float:
    """The share of the parameters' collectives that costs nothing, as it runs under computation.

        (1 - e) / slowdown        e = (u - early) / (1 - early), u = 2 / (n (a + b)), early = 0 where it is more than u

    Of n units, each gathered a times and reduced b times, one gather and one reduction are seen, less the share of the bytes
    of `early` parameters, which are first in order and counted by themselves. `parameters`: bytes of all; `tensors`: by name.
    Of several `stages` it is the half: the one pass that hides is short beside a step.
    """
    if not any(axis.size > 1 for axis in prices.mesh.axes):
        return 0.0
    early = math.fsum(tensors[name].bytes for name in work.early)
    units, known = units_of(parameters / stages, prices.unit_bytes, prices.cluster), min(early / parameters, 1.0) if parameters else 0.0
    twice = 2 / sum(replace(work, once=1.0).gathers)
    unit, known = twice / units, twice * known
    alone = (unit - known if known < unit else unit) / (1 - known) if known < 1 else 1.0
    most = 1 / SLOWDOWN[prices.cluster.backend] if hides(prices.cluster) else 0.0
    return max(1 - alone, 0.0) * (most if stages == 1 else 0.5 * most)


def most_hidden(work: Multiplicities, prices: MeshPrices, covers: float = 0.0) -> Multiplicities:
    """Multiplicities whose sum no step undercuts, whatever of the parameters' collectives runs under computation.

        step >= (1 - l) [ X + (1 - 1 / slowdown) sum over links k of a_k S_k ] + l [ X - Y + S_1 ]        sum of a_k = 1

    X: all computation, which does 1 / slowdown of its work while anything is sent; Y: that of the first forward and the last backward
    pass, during which all is gathered and reduced (of all passes, where each gathers or reduces). S_k: seconds of all collectives of
    parameters over link k. Most is sent over the outermost, which counts `OUTERMOST`, the others together the rest. `covers`: l.
    """
    if not hides(prices.cluster):
        return replace(work, hidden=0.0)
    axes = tuple(number for number, axis in enumerate(prices.mesh.axes) if axis.size > 1)
    links, slowed = {prices.link((axis,)) for axis in axes}, (1 - covers) * (1 - 1 / SLOWDOWN[prices.cluster.backend])
    if len(links) < 2 or not slowed:
        return replace(work, hidden=1 - slowed - covers, covers=covers)
    seen = OUTERMOST * slowed + covers
    return replace(work, hidden=1 - seen, covers=covers, busy=prices.link(axes), beside=(1 - OUTERMOST) * slowed / seen)


def exposed_seconds(tables: Tables, solution: Solution, work: Multiplicities) -> float:
    """Exposed seconds of the parameters' messages beside those that a solution's tables count (fewer: below 0).

    Under the forward pass the gathers are hidden but for the first unit's, under the backward pass the reductions but for the
    last one's; what is done once a step, under that of one micro-batch. Of the first and the last unit are `early` parameters,
    unless these fill units of their own.
    """
    sent = sent_seconds(tables, solution, work)
    pairs = zip(tables.variables, tables.graph.unary, solution.choices, strict=True)
    each = math.fsum(float(unary[choice]) for v, unary, choice in pairs if v.what == "operator") / work.passes
    covers = FORWARD * each * (work.passes if work.zero == 3 else 1.0), (1 - FORWARD) * each * (work.passes if work.zero >= 2 else 1.0)
    prices, counts = tables.prices, tables.counts
    units = units_of(sum(t.bytes * counts.get(t.name, 1) for t in tables.analysis.graph.parameters), prices.unit_bytes, prices.cluster)
    late, slowdown = messages(tables, solution, work, units), SLOWDOWN[prices.cluster.backend]
    seen = late.count * prices.cluster.device.launch - (1 - work.hidden) * (sent.gathers + sent.reductions)
    ways = (
        (sent.gathers + late.gathers, sent.early_gathers, work.gathers[0], covers[0]),
        (sent.reductions + late.reductions, sent.early_reductions, work.gathers[1], covers[1]),
    )
    for seconds, early, often, cover in ways:
        unit = (seconds + early) / (units * often)
        alone = min(unit - early if early < unit else unit, seconds)
        seen += alone + max((1 - 1 / slowdown) * (seconds - alone), seconds - alone - cover)
    return seen


class Sent(NamedTuple):
    """Seconds of gathers, and of reductions, of all parameters but the first and the last of `early` ones, and of these."""

    gathers: float
    reductions: float
    early_gathers: float
    early_reductions: float


def sent_seconds(tables: Tables, solution: Solution, work: Multiplicities) -> Sent:
    """Seconds of a solution's collectives of parameters, including the share that its tables leave out."""
    choices, (ahead, back), once = solution.choices, work.gathers, work.once
    gathers, reductions, early_gathers, early_reductions = ([0.0] for _ in range(4))
    for (u, v), aside in tables.aside.items():
        source, target = tables.variables[u], tables.variables[v]
        hidden = work.hidden_of(source.name, reader := None if source.what == "parameter" else target.name)
        seen = float(tables.graph.edges[u, v][choices[u], choices[v]] - aside[choices[u], choices[v]])
        tensor, early = tables.analysis.graph.tensors[source.name], work.is_early(source.name, reader)
        gather, reduction = 0.0, seen / (once * (1 - hidden)) if once else 0.0
        twice = once, once
        if tables.spaces[source.name].divisors()[source.rows[choices[u]]] > 1:
            often, wider = work.of_parameters(hidden), tables.types.reduced_bytes(tensor) / tensor.bytes
            gather = seen / (often[0] + often[1] * wider)
            reduction, twice = gather * wider, (ahead, back)
        if early:
            early_gathers.append(once * gather)
            early_reductions.append(once * reduction)
        gathers.append((twice[0] - early * once) * gather)
        reductions.append((twice[1] - early * once) * reduction)
    sums = map(math.fsum, (gathers, reductions, early_gathers, early_reductions))
    return Sent(*sums)


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
    # One unit is always exposed; of the others, what exceeds the pass, and at least by how much they slow it.
    rest = seconds * (1 - 1 / units)
    return seconds - rest + max(rest - cover, (1 - 1 / slowdown) * rest)
