"""Bounds of pipelines within the memory of a device, for every cut of the model into stages.

With K' X + g as in `with_stages`, M the memory of a device, q a price in seconds of a byte, and f_s
the micro-batches that stage s has in flight, p stages take for any f

    p T >= max over q >= 0 of  min over strategies of  K' X + g + q ( stored + f saved - w p M )
    w = mean over s of max(1, f / f_s)

in the mode (recompute, ZeRO) where that is least. For stage s holds stored_s + f_s saved_s <= M.
Weighted by max(1, f / f_s), its stored bytes count once at the least, and those that it saves f
times, so that the sum over all stages is what q prices. With the fewest of all stages as f all have
the weight 1; with the most, each stage counts as if it had as much in flight as the first one.

No gradient counts twice, and one stage works on the loss (`last_backward`). Optimizer state that
may be in host memory takes nothing at first; in the last look g has the seconds of its way there
and back. A candidate is divided into leaves, each a set of modes and schedules. The leaf of the
least bound is divided, or bounded more closely, first.
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
from autopar.planning.tables.requested import with_host_choices
from autopar.search import NoAssignment, bound_within

from .forced_recompute import least_used
from .last_backward import at_once, counted_once
from .least_passes import NOTHING, UPDATES, Sight
from .with_stages import PipelineBounds, Schedule

LOOKS = 3
"""How often a leaf of one mode and schedule is bounded; the last time with state in host memory."""
TOGETHER = 2
"""How often a leaf of several modes or schedules is bounded before it is divided."""
ROWS = 16
"""The most groups of stages that have weights of their own."""
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
        if leaf.alone and leaf.looks >= (LOOKS if self.request.may_offload else LOOKS - 1):
            return None
        return [*leaves[:place], *self._look(candidate, leaf, room, enough), *leaves[place + 1 :]]

    def _look(self, candidate: Candidate, leaf: Leaf, room: float, enough: float) -> list[Leaf]:
        """Return what a leaf becomes by one look."""
        free = self.pipelines.free
        # It was looked at as a whole; its parts have higher bounds each.
        if leaf.looks == TOGETHER and not leaf.alone:
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

        The first look weighs all stages alike, the others those more that have less in flight. The
        last one has the optimizer's state on the device, or in host memory for its seconds.
        """
        bound = leaf.bound
        try:
            bound = max(bound, self._least_within(candidate, leaf, room, enough))
        except NoAssignment:
            bound = math.inf
        return replace(leaf, bound=bound, looks=leaf.looks + 1)

    def _of_modes(
        self, candidate: Candidate, leaf: Leaf, work: Multiplicities, *, hosting: bool = False
    ) -> Tables:
        """Return the tables of a leaf's fastest mode with the memory of its thriftiest."""
        tables = self._tables(candidate, replace(work, zero=min(leaf.zeros)), hosting=hosting)
        if len(leaf.zeros) == 1:
            return tables
        thriftiest = self._tables(candidate, replace(work, zero=max(leaf.zeros)))
        return replace(tables, graph=replace(tables.graph, memory=thriftiest.graph.memory))

    def _least_within(self, candidate: Candidate, leaf: Leaf, room: float, enough: float) -> float:
        """Return seconds of a step within the memory, weighted as the leaf's look asks for.

        The mode is the fastest of the leaf, with the memory of its thriftiest.
        """
        hosting = leaf.looks == LOOKS - 1
        sight = UPDATES if hosting else self._sight(candidate, leaf)
        passes = max(
            min(self.pipelines.passes(candidate, schedule, sight) for schedule in leaf.schedules),
            0.0,
        )
        # The first stage has most in flight, the last one fewest.
        stage = 0 if leaf.looks else candidate.stages - 1
        flying = min(_flying(candidate, schedule, stage) for schedule in leaf.schedules)
        work = self.pipelines.work(candidate, leaf.recompute, passes, sight)
        work = replace(work, in_flight=flying)
        graph = self._of_modes(candidate, leaf, work, hosting=hosting).graph
        weights = max(_weights(candidate, schedule, flying) for schedule in leaf.schedules)
        limit = weights * room / least_used(leaf.recompute)
        near = bound_within(
            graph, limit, price=self._prices.get(candidate, 0.0), enough=enough * candidate.stages
        )
        # A search that begins at next to nothing would never reach a price that counts.
        counts = near.price * limit > EFFORT.bounded * abs(near.bound)
        self._prices[candidate] = near.price if counts else 0.0
        return near.bound / candidate.stages

    def _sight(self, candidate: Candidate, leaf: Leaf) -> Sight:
        """Return the sight that gave the highest bound without a limit of memory."""
        if leaf.schedules[0][1] == 1:
            return NOTHING
        proven = self.pipelines.proven(candidate)
        bounds = self.pipelines.by_sight(proven, candidate, leaf.schedules[-1])
        return max(bounds, key=lambda sight: bounds[sight])

    def _tables(
        self, candidate: Candidate, work: Multiplicities, *, hosting: bool = False
    ) -> Tables:
        """Return the tables within the memory.

        Where the optimizer's state may be in host memory, it takes nothing, as if that were free.
        `hosting`: it is a choice that takes seconds, as updates are in sight.
        """
        tables = counted_once(self.pipelines.tables(candidate, work), work)
        if self.request.train:
            # A pipeline hands its outputs over as they come.
            tables = at_once(tables, work.segments, 0)
        self.looked += sum(table.size for table in tables.graph.edges.values())
        if hosting:
            return with_host_choices(self.request, tables, candidate.stages)
        if self.request.has_host and self.request.offload != "none":
            return _without_state(tables)
        return tables


def _flying(candidate: Candidate, schedule: Schedule, stage: int) -> float:
    """Return the micro-batches that a stage has in flight."""
    name, chunks = schedule
    return in_flight(name, stage, candidate.stages, candidate.micro_batches, chunks)


def _weights(candidate: Candidate, schedule: Schedule, flying: float) -> float:
    """Return the mean over all stages of max(1, flying / f), or a little more."""
    stages = candidate.stages
    length = math.ceil(stages / ROWS)
    total = 0.0
    for first in range(0, stages, length):
        behind = min(first + length, stages)
        # Later stages have no more in flight, so that the last of some in a row stands for all.
        fewest = _flying(candidate, schedule, behind - 1)
        total += (behind - first) * max(1.0, flying / fewest)
    return total / stages


def _without_state(tables: Tables) -> Tables:
    """Return tables with nothing of the optimizer's state on the device."""
    return tables.lighter(
        lambda tensor, shards: state_bytes(tensor, shards, tables.optimizer, tables.types)
    )
