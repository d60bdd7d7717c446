"""Bounds of pipelines within the memory of a device, for every cut of the model into stages.

With K' X + g as in `with_stages`, M the memory of a device, q a price in seconds of a byte, and f
the fewest micro-batches that any stage has in flight, p stages take

    p T >= max over q >= 0 of  min over strategies of  K' X + g + q ( stored + f saved - p M )

in the mode (recompute, ZeRO) where that is least. A candidate is divided into leaves, each a set of
modes and schedules. The leaf of the least bound is divided, or bounded more closely, first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.step.host_offload import state_bytes
from autopar.order.schedules import in_flight
from autopar.planning.model.effort import EFFORT
from autopar.planning.space import Candidate, Mode, Multiplicities
from autopar.planning.tables import Tables
from autopar.planning.tables.tables import Choices, Floats
from autopar.search import CostGraph, NoAssignment, bound_within, nearly

from .forced_recompute import UNDERCUT
from .least_passes import NOTHING, Sight
from .with_stages import PipelineBounds, Schedule

GROUPS = (1, 2, 4, 1 << 30)
"""The numbers of chunks at which each group of schedules begins.

The schedules of a group are looked at together first, as their passes differ little.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Some modes and schedules of a candidate, with a bound of its step in all of them.

    The modes recompute the same; `zeros`: their ZeRO stages. `looks`: how often the leaf was
    bounded within the memory.
    """

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
        """Return the leaf divided by its modes, or by its schedules if it is one mode."""
        if len(self.zeros) > 1:
            # ZeRO 2 and 3 need nearly the same memory, so they stay together for one more look.
            groups = (self.zeros[:1], self.zeros[1:])
            return [replace(self, zeros=zeros, looks=0) for zeros in groups]
        return [replace(self, schedules=(schedule,), looks=0) for schedule in self.schedules]


class StagesWithinMemory:
    """Raises the bounds of leaves by solutions at a price of a byte.

    `looked`: the entries of all tables that were looked at so far.
    """

    def __init__(self, pipelines: PipelineBounds) -> None:
        self.pipelines = pipelines
        self.request = pipelines.request
        self.looked = 0
        # The last price on each candidate, from which the next search for a price begins.
        self._prices: dict[Candidate, float] = {}

    def leaves(self, candidate: Candidate, modes: Iterable[Mode]) -> list[Leaf]:
        """Return the modes and schedules of a candidate, with what is proven of them so far."""
        zeros_of: dict[str, list[int]] = {}
        for mode in modes:
            zeros_of.setdefault(mode.recompute, []).append(mode.zero)
        schedules = self.pipelines.schedules(candidate)
        groups = [
            tuple(schedule for schedule in schedules if low <= schedule[1] < high)
            for low, high in itertools.pairwise(GROUPS)
        ]
        leaves = []
        # What is recomputed changes the seconds most, so leaves are divided by it first.
        for recompute, zeros in zeros_of.items():
            for group in filter(None, groups):
                if not self.pipelines.bounds.recompute.fits(candidate, recompute, group):
                    continue
                bound = self.pipelines.repeating(candidate, group, recompute)
                leaf = Leaf(recompute=recompute, zeros=tuple(zeros), schedules=group, bound=bound)
                leaves.append(leaf)
        return leaves

    def closer(
        self, candidate: Candidate, leaves: Sequence[Leaf], room: float, enough: float
    ) -> list[Leaf] | None:
        """Return the leaves with the one of the least bound divided or bounded more closely.

        `room`: bytes of all stages together. `enough`: seconds above which a bound need not rise.
        Returns None if that leaf cannot be looked at any more closely.
        """
        place = min(range(len(leaves)), key=lambda i: leaves[i].bound)
        leaf = leaves[place]
        if leaf.alone and leaf.looks > 1:
            return None
        return [*leaves[:place], *self._look(candidate, leaf, room, enough), *leaves[place + 1 :]]

    def _look(self, candidate: Candidate, leaf: Leaf, room: float, enough: float) -> list[Leaf]:
        """Return what a leaf becomes by one look."""
        free = self.pipelines.free
        # It was looked at as a whole; its parts have higher bounds each.
        if leaf.looks and not leaf.alone:
            return [
                replace(
                    part, bound=max(part.bound, free(candidate, part.schedules, part.recompute))
                )
                for part in leaf.parts()
            ]
        without_limit = free(candidate, leaf.schedules, leaf.recompute)
        if leaf.bound < without_limit:
            return [replace(leaf, bound=without_limit)]
        return [self._limited(candidate, leaf, room, enough)]

    def _limited(self, candidate: Candidate, leaf: Leaf, room: float, enough: float) -> Leaf:
        """Return a leaf with its bound within the memory.

        The first look takes every stage to keep as few micro-batches in flight as any stage does.
        """
        try:
            if leaf.looks:
                seconds = self._tilted(candidate, leaf, room)
            else:
                seconds = self._level(candidate, leaf, room, enough)
        except NoAssignment:
            seconds = math.inf
        bound = max(leaf.bound, seconds / candidate.stages)
        return replace(leaf, bound=bound, looks=leaf.looks + 1)

    def _level(self, candidate: Candidate, leaf: Leaf, room: float, enough: float) -> float:
        """Return seconds of all stages, each with the fewest micro-batches in flight of any.

        The mode is the fastest of the leaf, with the memory of its thriftiest.
        """
        sight = self._sight(candidate, leaf)
        passes = max(
            min(self.pipelines.passes(candidate, schedule, sight) for schedule in leaf.schedules),
            0.0,
        )
        fewest = min(min(_ends(candidate, schedule)) for schedule in leaf.schedules)
        work = self.pipelines.work(candidate, leaf.recompute, passes, sight)
        work = replace(work, in_flight=fewest)
        graph = self._tables(candidate, replace(work, zero=min(leaf.zeros))).graph
        if len(leaf.zeros) > 1:
            thriftiest = self._tables(candidate, replace(work, zero=max(leaf.zeros)))
            graph = replace(graph, memory=thriftiest.graph.memory)
        limit = room / UNDERCUT
        near = bound_within(
            graph, limit, price=self._prices.get(candidate, 0.0), enough=enough * candidate.stages
        )
        # A search that begins at next to nothing would never reach a price that counts.
        counts = near.price * limit > EFFORT.bounded * abs(near.bound)
        self._prices[candidate] = near.price if counts else 0.0
        return near.bound

    def _tilted(self, candidate: Candidate, leaf: Leaf, room: float) -> float:
        """Return seconds of all stages, each with its own micro-batches in flight.

        The first stages keep most in flight. So that no stage is dearer than another at the price
        of a byte, the passes of the first count for less, by `tilt`. The bound is concave in the
        stage's number then, and the least of both ends bounds them all.
        """
        schedule = leaf.schedules[0]
        sight = self._sight(candidate, leaf)
        first, last = _ends(candidate, schedule)
        middle = 0.5 * (first + last)
        passes = self.pipelines.passes(candidate, schedule, sight)
        work = self.pipelines.work(candidate, leaf.recompute, passes, sight)
        work = replace(work, zero=leaf.zeros[0])
        graph = self._tables(candidate, replace(work, in_flight=middle)).graph
        limit = room / UNDERCUT
        near = bound_within(graph, limit, price=self._prices.get(candidate, 0.0))
        if not near.price:
            return near.bound
        # The difference of one more pass gives seconds and bytes of a pass at these choices.
        following = self._tables(
            candidate, replace(work, passes=passes + 1, in_flight=middle + 1)
        ).graph
        pass_seconds = following.cost(near.choices) - graph.cost(near.choices)
        saved = following.memory_of(near.choices) - graph.memory_of(near.choices)
        tilt = near.price * saved * (first - last) / pass_seconds
        passes = self.pipelines.passes(candidate, schedule, sight, tilt)
        ends = []
        for side, flying in ((-0.5, first), (0.5, last)):
            counted = max(passes + side * tilt, 0.0)
            tables = self._tables(candidate, replace(work, passes=counted, in_flight=flying))
            priced = nearly(_priced(tables, near.price), close=EFFORT.bounded)
            ends.append(priced.lower_bound - near.price * room / UNDERCUT)
        return min(ends)

    def _sight(self, candidate: Candidate, leaf: Leaf) -> Sight:
        """Return the sight that gave the highest bound without a limit of memory."""
        if leaf.schedules[0][1] == 1:
            return NOTHING
        proven = self.pipelines.proven(candidate)
        bounds = self.pipelines.by_sight(proven, candidate, leaf.schedules[-1])
        return max(bounds, key=lambda sight: bounds[sight])

    def _tables(self, candidate: Candidate, work: Multiplicities) -> Tables:
        """Return the tables within the memory.

        Where the optimizer's state may be in host memory, it takes nothing, as if that were free.
        """
        tables = self.pipelines.tables(candidate, work)
        self.looked += sum(table.size for table in tables.graph.edges.values())
        if self.request.has_host and self.request.offload != "none":
            return _without_state(tables)
        return tables


def _ends(candidate: Candidate, schedule: Schedule) -> tuple[float, float]:
    """Return the micro-batches that the first and the last stage have in flight."""
    name, chunks = schedule
    first, last = (
        in_flight(name, stage, candidate.stages, candidate.micro_batches, chunks)
        for stage in (0, candidate.stages - 1)
    )
    return first, last


def _without_state(tables: Tables) -> Tables:
    """Return tables with nothing of the optimizer's state on the device."""
    return tables.lighter(
        lambda tensor, shards: state_bytes(tensor, shards, tables.optimizer, tables.types)
    )


def _priced(tables: Tables, price: float) -> CostGraph:
    """Return the graph of tables with `price` seconds added for each byte."""
    known: dict[Choices, Floats] = {}
    for choices in tables.offered:
        if choices not in known:
            known[choices] = choices.seconds + price * choices.memory
    unary = tuple(known[choices] for choices in tables.offered)
    return replace(tables.graph, unary=unary, memory=None)
