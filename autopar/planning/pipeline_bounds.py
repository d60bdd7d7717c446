"""Bounds of pipelines: what no cut of the model into stages undercuts, whatever is sent, kept and recomputed.

With K and K' as of `passing`, X the least of a pass and g what is sent of parameters, or done to them, once a step, p stages take

    p T >= min over the schedules of  max( K X,  min over strategies of  K' X + g )                                          `Proven`

and within the memory M of a device, with a price on bytes, of which every stage keeps those of f micro-batches in flight at the least,

    p T >= max over prices q >= 0 of  min over strategies of  K' X + g + q ( stored + f saved - p M )                        `within`

in the mode (recompute, ZeRO) where that is least. Micro-batches that are parts of others are never faster: m' X' >= m X where m' >= m.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.step.host import state_bytes
from autopar.order.schedules import in_flight
from autopar.search import CostGraph, NoAssignment, nearly
from autopar.search.bounding import bound_within

from .bounds import Bounds
from .candidates import Candidate
from .multiplicities import Multiplicities
from .passing import ALL, NOTHING, UPDATES, Sight, least_passes
from .pipeline_pieces import MAX_PIECES
from .solved_candidate import Mode
from .tables import Floats, Tables
from .tuning import TUNING

UNDERCUT = 0.95
"""Share of the bytes that tables add up to that a program may keep. Optimizer state that may be in host memory is not counted at all."""
GROUPS = (1, 2, 4, 1 << 30)
"""Numbers of chunks at which groups of schedules begin that are looked at together first."""
Schedule = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """The least seconds of so many passes with what is in sight of what is done once a step."""

    sight: Sight
    passes: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """Of a candidate: the least seconds of its micro-batches' passes, and of passes beside what is done once a step."""

    micro_batches: int
    passes: float
    seen: tuple[Seen, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Modes that recompute the same, with their `zeros`, and schedules of a candidate; a bound of its step in all of them, and how often
    they were looked at within the memory."""

    recompute: str
    zeros: tuple[int, ...]
    schedules: tuple[Schedule, ...]
    bound: float
    looks: int = 0

    @property
    def alone(self) -> bool:
        """Whether it is one mode under one schedule."""
        return len(self.zeros) == len(self.schedules) == 1

    def parts(self) -> list[Leaf]:
        """Leaves of the first ZeRO stage and of the others, of which the last two are nearly alike; or else of a schedule each."""
        if len(self.zeros) > 1:
            return [replace(self, zeros=zeros, looks=0) for zeros in (self.zeros[:1], self.zeros[1:])]
        return [replace(self, schedules=(schedule,), looks=0) for schedule in self.schedules]


class PipelineBounds:
    """What solutions of their own prove of candidates with stages; `looked`: entries of tables within the memory so far."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds, self.folded, self.request = bounds, bounds.folded, bounds.request
        self.backend = self.request.cluster.backend
        self.known: dict[tuple[Candidate, str], Proven] = {}
        self.alone: dict[tuple[Candidate, str], Proven] = {}
        self.prices: dict[Candidate, float] = {}
        self.looked = 0

    def proven(self, candidate: Candidate, recompute: str = "none", enough: float = math.inf) -> Proven:
        """What holds within any memory, too; what proves `enough` need not be the most."""
        key = candidate, recompute
        if key not in self.known:
            self.known[key] = self._beside(candidate, recompute, self.passed(candidate, recompute, enough), enough)
        return self.known[key]

    def passed(self, candidate: Candidate, recompute: str = "none", enough: float = math.inf) -> Proven:
        """What the passes alone prove, in half the time."""
        key = candidate, recompute
        if key not in self.alone:
            count, alone = candidate.micro_batches, self._fewest(candidate)[1]
            seconds = self._least(candidate, self._tables(candidate, self._work(candidate, recompute, alone, NOTHING)), enough)
            self.alone[key] = Proven(micro_batches=count, passes=count / alone * seconds, seen=())
        return self.alone[key]

    def _fewest(self, candidate: Candidate) -> tuple[Schedule, float]:
        """The schedule of fewest passes, and these."""
        least = min(self._schedules(candidate), key=lambda schedule: self._passes(candidate, schedule, NOTHING))
        return least, self._passes(candidate, least, NOTHING)

    def _beside(self, candidate: Candidate, recompute: str, passed: Proven, enough: float) -> Proven:
        """What is proven by the passes, and by what is done once a step beside them."""
        count, passes, (least, alone), seen = candidate.micro_batches, passed.passes, self._fewest(candidate), []
        for sight in (ALL, UPDATES):
            beside = self._passes(candidate, least, sight)
            tables = self._tables(candidate, self._work(candidate, recompute, beside, sight)) if beside > 0 else None
            # Updates are mostly less than the passes that they cost.
            if tables is not None and (sight is ALL or tables.least_updates() > (alone - beside) / count * passes):
                seen.append(Seen(sight=sight, passes=beside, seconds=self._least(candidate, tables, enough)))
        return replace(passed, seen=tuple(seen))

    def carried(self, proven: Proven, candidate: Candidate) -> float:
        """Seconds that no step of a candidate undercuts, by what is proven of the same mesh with as many micro-batches or fewer."""
        return min(self._under(proven, candidate, schedule) for schedule in self._schedules(candidate))

    def _under(self, proven: Proven, candidate: Candidate, schedule: Schedule) -> float:
        """The same under one schedule."""
        return max(self._bounds(proven, candidate, schedule).values()) / candidate.stages

    def _bounds(self, proven: Proven, candidate: Candidate, schedule: Schedule) -> dict[Sight, float]:
        """Seconds of all stages, by what is in sight."""
        count, before = candidate.micro_batches, proven.micro_batches
        found = {NOTHING: self._passes(candidate, schedule, NOTHING) / count * proven.passes}
        for seen in proven.seen:
            passes = self._passes(candidate, schedule, seen.sight)
            more = passes / count - seen.passes / before
            share = passes / count * before / seen.passes
            found[seen.sight] = seen.seconds + more * proven.passes if more >= 0 else seen.seconds * max(share, 0.0)
        return found

    def _least(self, candidate: Candidate, tables: Tables, enough: float) -> float:
        """The least that tables add up to; where `enough` seconds of a step are less, these."""
        return nearly(tables.graph, close=TUNING.bounded, enough=enough * candidate.stages).lower_bound

    # --- within the memory ---

    def leaves(self, candidate: Candidate, modes: Iterable[Mode]) -> list[Leaf]:
        """The modes and schedules of a candidate, with what is proven of it."""
        zeros: dict[str, list[int]] = {}
        for mode in modes:
            zeros.setdefault(mode.recompute, []).append(mode.zero)
        every = self._schedules(candidate)
        groups = [tuple(s for s in every if low <= s[1] < high) for low, high in itertools.pairwise(GROUPS)]
        return [
            Leaf(recompute=recompute, zeros=tuple(found), schedules=group, bound=self._free(candidate, group, "none"))
            for (recompute, found), group in itertools.product(zeros.items(), filter(None, groups))
        ]

    def _free(self, candidate: Candidate, schedules: Iterable[Schedule], recompute: str) -> float:
        """The bound of some schedules without a limit of memory."""
        return min(self._under(self.proven(candidate, recompute), candidate, schedule) for schedule in schedules)

    def closer(self, candidate: Candidate, leaves: Sequence[Leaf], room: float, enough: float) -> list[Leaf] | None:
        """Leaves, of which the least is looked at more closely, within `room` bytes of all stages; None where there is no closer look."""
        place = min(range(len(leaves)), key=lambda i: leaves[i].bound)
        leaf = leaves[place]
        if leaf.alone and leaf.looks > 1:
            return None
        if leaf.looks and not leaf.alone:
            found = [replace(part, bound=max(part.bound, self._free(candidate, part.schedules, part.recompute))) for part in leaf.parts()]
        elif leaf.bound < (free := self._free(candidate, leaf.schedules, leaf.recompute)):
            found = [replace(leaf, bound=free)]
        else:
            found = [self._limited(candidate, leaf, room, enough)]
        return [*leaves[:place], *found, *leaves[place + 1 :]]

    def _limited(self, candidate: Candidate, leaf: Leaf, room: float, enough: float) -> Leaf:
        """A leaf within the memory: at first as if each stage kept as little in flight as any."""
        try:
            if leaf.looks:
                found = self._tilted(candidate, leaf, room)
            else:
                sight = self._sight(candidate, leaf)
                passes = max(min(self._passes(candidate, schedule, sight) for schedule in leaf.schedules), 0.0)
                flying = min(min(self._ends(candidate, schedule)) for schedule in leaf.schedules)
                work = replace(self._work(candidate, leaf.recompute, passes, sight), in_flight=flying)
                found = self._fastest(candidate, work, leaf.zeros, room / UNDERCUT, enough)
        except NoAssignment:
            found = math.inf
        return replace(leaf, bound=max(leaf.bound, found / candidate.stages), looks=leaf.looks + 1)

    def _fastest(self, candidate: Candidate, work: Multiplicities, zeros: Sequence[int], limit: float, enough: float) -> float:
        """Seconds of all stages in the mode of some ZeRO stages that is fastest with the bytes of the one that is thriftiest."""
        graph = self._graph(candidate, replace(work, zero=min(zeros)))
        if len(zeros) > 1:
            graph = replace(graph, memory=self._graph(candidate, replace(work, zero=max(zeros))).memory)
        near = bound_within(graph, limit, price=self.prices.get(candidate, 0.0), enough=enough * candidate.stages)
        # From next to nothing no price that counts would be reached.
        self.prices[candidate] = near.price if near.price * limit > TUNING.certain * abs(near.bound) else 0.0
        return near.bound

    def _sight(self, candidate: Candidate, leaf: Leaf) -> Sight:
        """What of all that is done once a step is best in sight."""
        bounds = self._bounds(self.proven(candidate), candidate, leaf.schedules[-1])
        return max(bounds, key=lambda sight: bounds[sight]) if leaf.schedules[0][1] > 1 else NOTHING

    def _tilted(self, candidate: Candidate, leaf: Leaf, room: float) -> float:
        """Seconds of all stages where these keep what they do, and the first ones, which keep most, count for fewer passes."""
        schedule, sight = leaf.schedules[0], self._sight(candidate, leaf)
        first, last = self._ends(candidate, schedule)
        flying, passes = 0.5 * (first + last), self._passes(candidate, schedule, sight)
        work = replace(self._work(candidate, leaf.recompute, passes, sight), zero=leaf.zeros[0])
        middle = replace(work, passes=passes, in_flight=flying)
        own = self._graph(candidate, middle)
        near = bound_within(own, room / UNDERCUT, price=self.prices.get(candidate, 0.0))
        price, choices = near.price, near.choices
        if not price:
            return near.bound
        more = self._graph(candidate, replace(middle, passes=passes + 1, in_flight=flying + 1))
        second, kept = more.cost(choices) - own.cost(choices), more.memory_of(choices) - own.memory_of(choices)
        tilt = price * kept * (first - last) / second
        passes = self._passes(candidate, schedule, sight, tilt)
        found = math.inf
        for side, keeps in ((-0.5, first), (0.5, last)):
            graph = self._graph(candidate, replace(work, passes=max(passes + side * tilt, 0.0), in_flight=keeps))
            found = min(found, nearly(_priced(graph, price), close=TUNING.bounded).lower_bound - price * room / UNDERCUT)
        return found

    def _ends(self, candidate: Candidate, schedule: Schedule) -> tuple[float, float]:
        """What the first and the last stage keep in flight."""
        name, chunks = schedule
        first, last = (in_flight(name, s, candidate.stages, candidate.micro_batches, chunks) for s in (0, candidate.stages - 1))
        return first, last

    def _work(self, candidate: Candidate, recompute: str, passes: float, sight: Sight) -> Multiplicities:
        return Multiplicities(
            counts=self.folded.counts, segments=self.folded.segments(recompute, short=True), accumulating=candidate.micro_batches > 1,
            passes=passes, once=sight.once, hidden=sight.hidden(self.backend),
        )  # fmt: skip

    def _schedules(self, candidate: Candidate) -> tuple[Schedule, ...]:
        """The schedules whose chunks are no more than the pieces into which a model is cut."""
        found = self.bounds.schedules(candidate.stages, candidate.micro_batches)
        return tuple((name, chunks) for name, chunks in found if candidate.stages * chunks <= MAX_PIECES or chunks == 1)

    def _passes(self, candidate: Candidate, schedule: Schedule, sight: Sight, tilt: float = 0.0) -> float:
        """The passes beside what is in sight of what is done once a step; the last stage counts for so many more than the first."""
        return least_passes(self.bounds.pipe(candidate.stages, candidate.micro_batches), *schedule, sight, tilt)

    def _graph(self, candidate: Candidate, work: Multiplicities) -> CostGraph:
        """The graph of tables within the memory: where the optimizer's state may be in host memory, as if that were free."""
        tables = self._tables(candidate, work)
        self.looked += sum(table.size for table in tables.graph.edges.values())
        return _on_device(tables) if self.request.has_host and self.request.offload != "none" else tables.graph

    def _tables(self, candidate: Candidate, work: Multiplicities) -> Tables:
        analysis = self.folded.analysis(short=True, micro_batches=candidate.micro_batches)
        return self.bounds.tables(analysis, candidate.cluster.devices, candidate.stages, candidate.mesh, work)


def _on_device(tables: Tables) -> CostGraph:
    """The graph of tables with nothing of the optimizer's state on the device."""
    return tables.lighter(lambda tensor, shards: state_bytes(tensor, shards, tables.optimizer, tables.types)).graph


def _priced(graph: CostGraph, price: float) -> CostGraph:
    """The graph with so much for each byte."""
    known: dict[tuple[int, int], Floats] = {}
    unary = []
    for seconds, memory in zip(graph.unary, graph.memory or (), strict=True):
        key = id(seconds), id(memory)
        if key not in known:
            known[key] = seconds + price * memory
        unary.append(known[key])
    return replace(graph, unary=tuple(unary), memory=None)
