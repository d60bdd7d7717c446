"""The link speeds, memory and batch at which a plan becomes another.

Each quantity is scaled alone, and the factor of the change bisected.

The factors 4, 16, 64 (and their inverses) bracket the first one at which the scheme's name changes.
The bracket is halved on a logarithmic scale, f = sqrt(same * changed), until its ends are within
`CLOSE` of one another. A flip and a flip back within one factor of 4 go unseen, and upwards within
64. The batch is doubled and halved.

    best(limit) = p, memory(p) <= m <= limit   =>   best(m) = p

So less memory is tried only below the need of the plans found, in strides of `CLOSE` and its
powers.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster
from autopar.errors import NoPlanFits, UsageError
from autopar.ir import Graph
from autopar.plan import Plan
from autopar.planning.model.progress import Progress
from autopar.planning.model.request import Request
from autopar.planning.remembered_plans import Searches
from autopar.schemes import scheme_of
from autopar.sharding.analysis import Analysis

from .side_by_side import side_by_side

STRIDE = 4.0
STRIDES = 3
"""The largest factor is the stride to this power."""
WHOLE_STRIDES = 4
"""The most doublings or halvings of a batch; its flip is not narrowed, because batches between
divide badly.
"""
CLOSE = 1.25
"""The ratio of a bracket's ends at which it is narrow enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flip:
    """The change of a plan as a quantity is scaled.

    `factor`, `value`: of the quantity at the change.

    `factor`: None if there is no change up to the `limit` tried. `step`: seconds of the new plan.
    """

    quantity: str
    direction: str
    becomes: str
    factor: float | None = None
    value: float | None = None
    limit: float | None = None
    step: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """The plan under scaled conditions: its name, seconds and bytes of a device.

    The name is the reason if there is no plan.
    """

    name: str
    step: float | None = None
    memory: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Quantity:
    """A figure to scale, with its present value.

    `whole`: it is a whole number. `plan`: plans at a factor.
    """

    name: str
    value: float
    whole: bool
    plan: Callable[[float], Probed]


class Sensitivity:
    """Plans a model under scaled figures.

    `batches`: the model's graph for another global batch.
    """

    def __init__(
        self,
        plan: Plan,
        graph: Graph,
        request: Request,
        *,
        batch: int = 0,
        batches: Callable[[int], Graph] | None = None,
    ) -> None:
        self.plan = plan
        self.graph = graph
        self.request = request
        self.batch = batch
        self.batches = batches
        self.known: dict[tuple[str, float], Probed] = {}
        self.searches = Searches(graph, request)
        self.best = self._named(graph, request)
        self.base = self.best.name

    def flips(self, progress: Progress | None = None) -> list[Flip]:
        """The changes of the plan for every quantity, downwards and upwards."""
        pairs = [(held, way) for held in self._quantities() for way in ("down", "up")]
        # Other batches read the model again, which may need more than processes beside one another
        # may do.
        beside = [pair for pair in pairs if not pair[0].whole]
        alone = [pair for pair in pairs if pair[0].whole]
        flips = []
        for flip in itertools.chain(side_by_side(self._flip_of, beside), map(self._flip_of, alone)):
            flips.append(flip)
            if progress:
                progress(len(flips), len(pairs), f"{flip.quantity} {flip.direction}")
        return flips

    def _flip_of(self, pair: tuple[_Quantity, str]) -> Flip:
        return self._flip(*pair)

    def _quantities(self) -> list[_Quantity]:
        request = self.request
        quantities = []
        for level in request.cluster.levels:
            if level.size > 1:
                named = f"{level.name} bandwidth"
                quantities.append(
                    _Quantity(
                        name=named,
                        value=level.bandwidth,
                        whole=False,
                        plan=functools.partial(self._with_links, level.name),
                    )
                )
        quantities.append(
            _Quantity(
                name="memory", value=request.memory_limit, whole=False, plan=self._with_memory
            )
        )
        if self.batches is not None and self.batch:
            quantities.append(
                _Quantity(name="batch", value=float(self.batch), whole=True, plan=self._with_batch)
            )
        return quantities

    def _with_links(self, level: str, factor: float) -> Probed:
        return self._named(
            self.graph,
            replace(self.request, cluster=scaled_links(self.request.cluster, level, factor)),
        )

    def _with_memory(self, factor: float) -> Probed:
        return self._named(
            self.graph, replace(self.request, memory=self.request.memory_limit * factor)
        )

    def _with_batch(self, factor: float) -> Probed:
        assert self.batches is not None
        return self._named(self.batches(round(self.batch * factor)), self.request)

    def searches_of(self, graph: Graph) -> Searches:
        """The searches of the model, or of its graph for another batch."""
        return self.searches if graph is self.graph else Searches(graph, self.request)

    def _named(self, graph: Graph, request: Request) -> Probed:
        searches = self.searches_of(graph)
        try:
            plan = searches.plan(request)
        except NoPlanFits:
            return Probed(name="no plan fits")
        except UsageError as error:
            return Probed(name=f"no plan: {error}")
        analysis = searches.folded.analysis(short=False)
        return Probed(
            name=scheme_of(plan, analysis).called,
            step=plan.predicted.step,
            memory=plan.predicted.memory,
        )

    def _flip(self, quantity: _Quantity, direction: str) -> Flip:
        if quantity.name == "memory" and direction == "down":
            return self._less_memory(quantity)
        same = 1.0
        for changed in self._tried(quantity, direction):
            try:
                probed = self._name(quantity, changed)
            except UsageError:  # impossible batch
                break
            if probed.name != self.base:
                if quantity.whole:
                    return _flipped(quantity, direction, changed, probed)
                return self._narrowed(quantity, direction, same, changed)
            same = changed
        return Flip(quantity=quantity.name, direction=direction, limit=same, becomes=self.base)

    def _less_memory(self, quantity: _Quantity) -> Flip:
        """The change at less memory, tried in growing strides below each plan's need."""
        least = STRIDE**-STRIDES
        same = self._enough(quantity, 1.0, self.best)
        stride = CLOSE
        while same > least:
            changed = max(same / stride, least)
            probed = self._name(quantity, changed)
            if probed.name != self.base:
                return self._narrowed(quantity, "down", same, changed)
            same = self._enough(quantity, changed, probed)
            stride = stride * CLOSE
        return Flip(quantity=quantity.name, direction="down", limit=least, becomes=self.base)

    def _enough(self, quantity: _Quantity, factor: float, probed: Probed) -> float:
        """The factor down to which a plan stays the best, because it fits that memory."""
        return (
            factor
            if probed.memory is None or quantity.name != "memory"
            else min(factor, probed.memory / quantity.value)
        )

    def _tried(self, quantity: _Quantity, direction: str) -> list[float]:
        """The factors that bracket a flip."""
        stride, count = (2.0, WHOLE_STRIDES) if quantity.whole else (STRIDE, STRIDES)
        factors = [
            stride ** (power if direction == "up" else -power) for power in range(1, count + 1)
        ]
        if quantity.whole:
            return [factor for factor in factors if quantity.value * factor >= 1]
        # More memory and faster links only add plans: if the largest factor changes nothing, no
        # smaller one does.
        free = direction == "up" and self._name(quantity, factors[-1]).name == self.base
        return factors[-1:] if free else factors

    def _narrowed(self, quantity: _Quantity, direction: str, same: float, changed: float) -> Flip:
        while max(same / changed, changed / same) > CLOSE:
            middle = math.sqrt(same * changed)
            probed = self._name(quantity, middle)
            if probed.name == self.base:
                same = self._enough(quantity, middle, probed) if direction == "down" else middle
            else:
                changed = middle
        return _flipped(quantity, direction, changed, self._name(quantity, changed))

    def _name(self, quantity: _Quantity, factor: float) -> Probed:
        key = (quantity.name, factor)
        if key not in self.known:
            self.known[key] = quantity.plan(factor)
        return self.known[key]


def _flipped(quantity: _Quantity, direction: str, factor: float, probed: Probed) -> Flip:
    value = factor * quantity.value
    return Flip(
        quantity=quantity.name,
        direction=direction,
        factor=factor,
        value=value,
        becomes=probed.name,
        step=probed.step,
    )


def scaled_links(cluster: Cluster, level: str, factor: float) -> Cluster:
    """The cluster with the bandwidth of one level multiplied.

    The collectives measured on it are multiplied, too.
    """

    def scaled(one: Cluster) -> Cluster:
        levels = tuple(
            replace(
                held,
                bandwidth=held.bandwidth * factor,
                peer_bandwidth=held.peer_bandwidth and held.peer_bandwidth * factor,
            )
            if held.name == level
            else held
            for held in one.levels
        )
        measured = tuple(
            entry.shared(factor) if level in _levels(entry.level) else entry
            for entry in one.measured
        )
        return replace(
            one, levels=levels, measured=measured, joined=tuple(scaled(pool) for pool in one.joined)
        )

    return scaled(cluster)


def _levels(text: str) -> set[str]:
    """The levels that an axis spans."""
    return {part.partition(":")[0] for part in text.split("+")}


def sensitivity_of(
    plan: Plan,
    analysis: Analysis,
    cluster: Cluster,
    *,
    memory: float | None,
    batches: Callable[[int], Graph],
) -> Sensitivity:
    """The sensitivity of the model's best plan without pins."""
    request = Request(
        cluster=cluster,
        train=analysis.train,
        optimizer=plan.model.optimizer,
        memory=memory,
        uniform=True,
        types=plan.schedule.types,
    )
    sizes = [spec.shape[0] for spec in plan.model.inputs.values() if spec.shape]
    batch = sizes[0] if sizes else 0
    return Sensitivity(plan, analysis.graph, request, batch=batch, batches=batches)
