"""The exposed seconds of the parameters' collectives, by one rule with and without stages.

A device gathers its n units before its first forward pass, and reduces their gradients in its last
backward pass. With t the seconds of all gathers (or of all reductions) of a pass,

    seen(t, pass) = t / n + max(t (1 - 1 / n) - pass, (1 - 1 / slowdown) t (1 - 1 / n))

The first gather and the last reduction have nothing to run under. The others run under the pass,
which does 1 / slowdown of its work while anything is sent. With stages, device d waits for its
first micro-batch while earlier devices compute, and finishes its last one that much earlier.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from autopar.costmodel import Cluster
from autopar.costmodel.step.covered import SLOWDOWN
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.costmodel.step.shared_cores import hidden_messages, hides
from autopar.ir import Tensor
from autopar.planning.space import Multiplicities
from autopar.planning.tables.tables import Tables, Variable
from autopar.search import Solution
from autopar.sharding.mesh import Axes

from .messages import messages

FORWARD = 1 / 3
"""The share of a pass that is its forward part: backward, a product becomes two of its size."""
OUTERMOST = 0.9
"""The weight of the outermost link in a bound; all others share the rest, as less is sent there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Once:
    """The seconds of one device that count once a step, and of the passes they run under.

    `forward`, `backward`: of one micro-batch. `gather`, `reduce`: of all gathers and reductions.
    `update`: of the optimizer. `gathered_in`, `reduced_in`: the numbers of units in which the
    parameters and their gradients travel, 1 where nothing hides them.
    """

    forward: float
    backward: float
    gather: float
    reduce: float
    update: float
    gathered_in: int
    reduced_in: int

    @property
    def hidden(self) -> float:
        """Seconds of gathers and reductions that run under the passes."""
        gathers = self.gather * (1 - 1 / self.gathered_in)
        reductions = self.reduce * (1 - 1 / self.reduced_in)
        return min(gathers, self.forward) + min(reductions, self.backward)

    def busy(self, micro_batches: int) -> float:
        """Return the seconds of all work in a step of so many micro-batches."""
        return (
            micro_batches * (self.forward + self.backward) + self.gather + self.reduce + self.update
        )

    def gather_seen(self, slowdown: float) -> float:
        """Return the exposed seconds of the gathers."""
        return _seen(self.gather, self.forward, self.gathered_in, slowdown)

    def reduce_seen(self, slowdown: float) -> float:
        """Return the exposed seconds of the reductions."""
        return _seen(self.reduce, self.backward, self.reduced_in, slowdown)


def units_of(nbytes: float, unit_bytes: float, cluster: Cluster) -> int:
    """Return the number of units in which so many bytes of parameters travel.

    Ranks that share cores have a single one, as nothing hides there.
    """
    return max(math.ceil(nbytes / unit_bytes), 1) if hides(cluster) else 1


def units_once(nbytes: float, unit_bytes: float, cluster: Cluster) -> tuple[int, int]:
    """Return the units in which so many bytes are gathered, and reduced, once a step.

    There is a single one where the framework runs nothing under it.
    """
    units = units_of(nbytes, unit_bytes, cluster)
    gathers, reductions = hidden_messages(cluster, per_pass=False)
    return (units if gathers else 1), (units if reductions else 1)


def hideable(
    prices: MeshPrices,
    parameters: float,
    work: Multiplicities,
    tensors: Mapping[str, Tensor],
    stages: int = 1,
) -> float:
    """Return the share of the parameters' collectives that costs nothing under computation.

        (1 - e) / slowdown        e = (u - early) / (1 - early), u = 2 / (n (a + b)), early = 0
                                  where it is more than u

    A step gathers each of n units a times, and reduces it b times. One gather and one reduction
    have nothing to run under: their share is u. The `early` parameters are first in order and
    counted by themselves, so their share is taken off.

    `parameters`: bytes of all of them. `tensors`: by name. With several `stages` half of it is
    hidden, because the one pass under which it runs is short beside a step.
    """
    if not any(axis.size > 1 for axis in prices.mesh.axes):
        return 0.0
    early_bytes = math.fsum(tensors[name].bytes for name in work.early)
    units = units_of(parameters / stages, prices.unit_bytes, prices.cluster)
    early = min(early_bytes / parameters, 1.0) if parameters else 0.0
    both = 2 / sum(replace(work, once=1.0).gathers)
    unit = both / units
    early = both * early
    # Early parameters of less than a unit are in the first unit, which is exposed in any case.
    # Those of more fill units of their own, and the unit behind them is exposed as well.
    if early >= 1:
        exposed = 1.0
    elif early < unit:
        exposed = (unit - early) / (1 - early)
    else:
        exposed = unit / (1 - early)
    # Gathers and reductions have about the same bytes.
    running = hidden_messages(prices.cluster, per_pass=work.zero == 3)
    most = sum(running) / len(running) / SLOWDOWN[prices.cluster.backend]
    if stages > 1:
        most *= 0.5
    return max(1 - exposed, 0.0) * most


def most_hidden(work: Multiplicities, prices: MeshPrices, covers: float = 0.0) -> Multiplicities:
    """Return multiplicities whose sum no step undercuts, however much is hidden.

        step >= (1 - l) [ X + (1 - 1 / slowdown) sum over links k of a_k S_k ]
                + l [ X - Y + S_1 ]                                        sum of a_k = 1

    X: the seconds of all computation, which does 1 / slowdown of its work while anything is sent.
    Y: those of the first forward and the last backward pass, during which all is gathered and
    reduced (of all passes, where each gathers or reduces). S_k: the seconds of all collectives of
    parameters over link k. Most is sent over the outermost link, which has the weight `OUTERMOST`;
    the others share the rest. `covers`: l.
    """
    if not hides(prices.cluster):
        return replace(work, hidden=0.0)
    axes, links = _links(prices)
    slowed = (1 - covers) * (1 - 1 / SLOWDOWN[prices.cluster.backend])
    if len(links) < 2 or not slowed:
        return replace(work, hidden=1 - slowed - covers, covers=covers)
    seen = OUTERMOST * slowed + covers
    return replace(
        work,
        hidden=1 - seen,
        covers=covers,
        busy=prices.link(axes),
        beside=(1 - OUTERMOST) * slowed / seen,
    )


def link_weight(prices: MeshPrices, link: str) -> float:
    """Return a_k of a link in such sums, whatever is sent over it."""
    axes, links = _links(prices)
    if len(links) < 2:
        return 1.0
    return OUTERMOST if link == prices.link(axes) else (1 - OUTERMOST) / (len(links) - 1)


def _links(prices: MeshPrices) -> tuple[Axes, set[str]]:
    """Return the axes of a mesh over which anything is sent, and their links."""
    axes = tuple(number for number, axis in enumerate(prices.mesh.axes) if axis.size > 1)
    return axes, {prices.link((axis,)) for axis in axes}


def exposed_seconds(tables: Tables, solution: Solution, work: Multiplicities) -> float:
    """Return the exposed seconds of the parameters' messages beyond those that tables count.

    They are negative if the tables count more. Under the forward pass all gathers are hidden but
    the first unit's, under the backward pass all reductions but the last one's. What is done once a
    step runs under one micro-batch. The first and the last unit hold the `early` parameters, unless
    these fill units of their own.
    """
    prices = tables.prices
    sent = sent_seconds(tables, solution, work)
    late = messages(tables, solution, work, _units(tables))
    forward, backward = _covers(tables, solution, work)
    ahead, back = work.gathers
    slowdown = SLOWDOWN[prices.cluster.backend]
    counted = (1 - work.hidden) * (sent.gathers + sent.reductions)
    seen = late.count * prices.cluster.device.launch - counted
    gathers, reductions = hidden_messages(prices.cluster, per_pass=work.zero == 3)
    for seconds, early, often, cover, under in (
        (sent.gathers + late.gathers, sent.early_gathers, ahead, forward, gathers),
        (sent.reductions + late.reductions, sent.early_reductions, back, backward, reductions),
    ):
        if not under:
            seen += seconds
            continue
        unit = (seconds + early) / (_units(tables) * often)
        alone = min(unit - early if early < unit else unit, seconds)
        rest = seconds - alone
        # What is hidden slows the pass that it runs under.
        seen += alone + max((1 - 1 / slowdown) * rest, rest - cover)
    return seen


def _units(tables: Tables) -> int:
    """Return the number of units in which the parameters of tables travel."""
    nbytes = sum(
        tensor.bytes * tables.counts.get(tensor.name, 1)
        for tensor in tables.analysis.graph.parameters
    )
    return units_of(nbytes, tables.prices.unit_bytes, tables.prices.cluster)


def _covers(tables: Tables, solution: Solution, work: Multiplicities) -> tuple[float, float]:
    """Return the seconds of computation under which gathers, and reductions, may run."""
    operators = []
    for variable, seconds, choice in zip(
        tables.variables, tables.graph.unary, solution.choices, strict=True
    ):
        if variable.what == "operator":
            operators.append(float(seconds[choice]))
    each = math.fsum(operators) / work.passes
    # What is sent for every pass runs under every pass.
    forward = FORWARD * each * (work.passes if work.zero == 3 else 1.0)
    backward = (1 - FORWARD) * each * (work.passes if work.zero >= 2 else 1.0)
    return forward, backward


class Sent(NamedTuple):
    """The seconds of all parameters' gathers and reductions in a step.

    Those of `early` parameters that nothing hides are apart from the others.
    """

    gathers: float
    reductions: float
    early_gathers: float
    early_reductions: float


def sent_seconds(tables: Tables, solution: Solution, work: Multiplicities) -> Sent:
    """Return the seconds of a solution's collectives of parameters.

    They include the share that its tables leave out as hidden.
    """
    choices = solution.choices
    gathers = [0.0]
    reductions = [0.0]
    early_gathers = [0.0]
    early_reductions = [0.0]
    for (u, v), aside in tables.aside.items():
        source = tables.variables[u]
        target = tables.variables[v]
        readers = None if source.what == "parameter" else target.members
        edge = tables.graph.edges[u, v]
        counted = float(edge[choices[u], choices[v]] - aside[choices[u], choices[v]])
        hidden = work.hidden_of(source.name, readers)
        gather, reduction, often = _one_way(tables, source, choices[u], work, counted, hidden)
        early = work.is_early(source.name, readers)
        if early:
            early_gathers.append(work.once * gather)
            early_reductions.append(work.once * reduction)
        # Only the first gather and the last reduction of an early parameter have nothing to run
        # under.
        gathers.append((often[0] - early * work.once) * gather)
        reductions.append((often[1] - early * work.once) * reduction)
    return Sent(
        gathers=math.fsum(gathers),
        reductions=math.fsum(reductions),
        early_gathers=math.fsum(early_gathers),
        early_reductions=math.fsum(early_reductions),
    )


def _one_way(
    tables: Tables,
    source: Variable,
    choice: int,
    work: Multiplicities,
    counted: float,
    hidden: float,
) -> tuple[float, float, tuple[float, float]]:
    """Return the seconds of one gather and one reduction, and how often each is done in a step.

    `counted`: the seconds of all of them in the tables, which leave out the share `hidden`.
    """
    shards = tables.spaces[source.name].divisors()[source.rows[choice]]
    if shards > 1:
        tensor = tables.analysis.graph.tensors[source.name]
        ahead, back = work.of_parameters(hidden)
        wider = tables.types.wider(tensor)
        gather = counted / (ahead + back * wider)
        return gather, gather * wider, work.gathers
    # A parameter that is stored whole is not gathered, only its gradient is reduced.
    reduction = counted / (work.once * (1 - hidden)) if work.once else 0.0
    return 0.0, reduction, (work.once, work.once)


def once_seconds(devices: Iterable[Once], backend: str, interleave: int = 1) -> float:
    """Return the exposed seconds of gathers, reductions and updates of a pipeline.

    `devices`: in the order of their stages.
    """
    # A device's gathers also run while earlier devices pass their first micro-batch forward
    # (`passed`), its reductions while these devices pass their last one backward (`finished`).
    slowdown = SLOWDOWN[backend]
    before = 0.0
    behind = 0.0
    passed = 0.0
    finished = 0.0
    for device in devices:
        before = max(before, device.gather_seen(slowdown) - passed)
        behind = max(behind, device.reduce_seen(slowdown) + device.update - finished)
        passed += device.forward / interleave
        finished += device.backward / interleave
    return before + behind


def _seen(seconds: float, cover: float, units: int, slowdown: float) -> float:
    """Return how much of `seconds`, sent in so many units, is exposed (see the module)."""
    # One unit is always exposed. Of the others it is what exceeds the pass, and at least the time
    # by which they slow it.
    rest = seconds * (1 - 1 / units)
    return seconds - rest + max(rest - cover, (1 - 1 / slowdown) * rest)
