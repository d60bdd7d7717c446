"""The bytes that devices send to each other in a step, from the collectives of a plan.

    all-reduce 2 (n - 1) / n N      all-gather, reduce-scatter, all-to-all (n - 1) / n N      send N

These are the bytes that a device in a group of n sends for a collective of N bytes: the least of
all methods. In an all-to-all each member sends alike to all others. The other collectives are drawn
as rings, in which a member sends to the next one. Backends may choose trees and switches; then sums
by device are the same, but pairs may differ.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel import Cluster
from autopar.plan import Plan
from autopar.plan_parts import StagePlan
from autopar.schemes import stages_of
from autopar.sharding.mesh import JOINED, Axes, degree_of

from .account import Account

MOST_BLOCKS = 48
"""The most rows of the matrix; more devices are joined into blocks."""
BETWEEN_STAGES = "between stages"
Matrix = NDArray[np.float64]
Integers = NDArray[np.int64]
Group = tuple[int, tuple[int, ...], Axes, str, bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Issued:
    """A collective of a step: its axis or axes (by name), stage, bytes and seconds."""

    stage: int
    axis: str
    phase: str
    kind: str
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """All collectives of one kind on one axis in one phase."""

    axis: str
    phase: str
    kind: str
    times: int
    nbytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanges:
    """Bytes of one step from block to block of `size` devices, and by level of the cluster."""

    matrix: Matrix
    size: int
    levels: dict[str, float]

    def name(self, block: int, devices: int) -> str:
        """The name of a block."""
        first = block * self.size
        last = min((block + 1) * self.size, devices) - 1
        return str(first) if first == last else f"{first}-{last}"


def issued_by(plan: Plan, account: Account | None) -> list[Issued]:
    """The collectives of a step.

    From the plan file alone and with stages, these are those of a micro-batch.
    """
    stage = _Stages(plan)
    if account is None:
        return [
            Issued(
                stage=stage.of(c.tensor),
                axis=c.axis,
                phase=c.phase,
                kind=c.kind,
                nbytes=c.nbytes,
                seconds=c.seconds,
            )
            for c in plan.collectives
        ]
    pairs = [
        (stage.operators.get(a.operator.name, 0), pair)
        for a in account.operators
        for pair in a.collectives
    ]
    pairs += [
        (stage.of(u.parameters[0]) if u.parameters else 0, pair)
        for u in account.units
        for pair in u.collectives
    ]
    pairs += [(stage.of(pair[0].tensor), pair) for pair in account.updates]
    return [
        Issued(
            stage=at,
            axis=account.over(c.axes),
            phase=c.phase,
            kind=c.kind,
            nbytes=c.nbytes,
            seconds=seconds,
        )
        for at, (c, seconds) in pairs
    ]


def totals(issued: Iterable[tuple[str, str, str, int, float]]) -> list[Total]:
    """The sums of collectives by axis, phase and kind, in their order.

    `issued`: (axis, phase, kind, bytes, seconds) of each.

    >>> issued = [("gpu", "forward", "all_reduce", nbytes, 0.5) for nbytes in (4, 8)]
    >>> [total.nbytes for total in totals(issued)]
    [12]
    """
    sums: dict[tuple[str, str, str], tuple[int, int, float]] = {}
    for axis, phase, kind, nbytes, seconds in issued:
        times, held, spent = sums.get((axis, phase, kind), (0, 0, 0.0))
        sums[axis, phase, kind] = (times + 1, held + nbytes, spent + seconds)
    return [
        Total(axis=axis, phase=phase, kind=kind, times=times, nbytes=nbytes, seconds=seconds)
        for (axis, phase, kind), (times, nbytes, seconds) in sorted(sums.items())
    ]


def levels_of(plan: Plan, summed: Iterable[Total] = ()) -> dict[str, str]:
    """The cluster's level of each mesh axis over all stages, and of each group of axes."""
    levels = {
        axis.name: axis.level
        for mesh in (plan.mesh, *(stage.mesh for stage in plan.stages))
        for axis in mesh
    }
    for name in dict.fromkeys(one.axis for one in summed if JOINED in one.axis):
        levels[name] = JOINED.join(
            dict.fromkeys(levels.get(axis, "") for axis in name.split(JOINED))
        )
    return levels


class _Stages:
    """The stages of operators, and of tensors by their makers and readers."""

    def __init__(self, plan: Plan) -> None:
        count = stages_of(plan)
        self.operators = {name: number % count for name, number in plan.chunks().items()}
        self.tensors: dict[str, int] = {}
        for name, operator in plan.operators.items():
            at = self.operators[name]
            self.tensors.update(dict.fromkeys((tensor for tensor, _ in operator.outputs), at))
            for tensor, _ in operator.inputs:
                self.tensors.setdefault(tensor, at)

    def of(self, tensor: str) -> int:
        return self.tensors.get(tensor, 0)


def exchanges(plan: Plan, issued: Sequence[Issued], cluster: Cluster | None) -> Exchanges:
    """The matrix of a plan."""
    units = cluster.units if cluster is not None and not cluster.joined else ()
    size = _block_size(plan.devices, units)
    blocks = -(-plan.devices // size)
    matrix = np.zeros((blocks, blocks))
    levels = defaultdict[str, float](float)
    names = [level.name for level in cluster.levels] if cluster is not None else []
    for (start, sizes, axes, level, ring), sent in _sums(plan, issued).items():
        # A group over axes: the devices with equal coordinates on all other axes.
        numbers = np.arange(math.prod(sizes)).reshape(sizes)
        last = range(-len(axes), 0)
        groups = start + np.moveaxis(numbers, axes, last).reshape(-1, degree_of(axes, sizes))
        _carry(groups, sent, ring, matrix, size)
        shares = _by_level(groups, ring, units) if units else [1.0]
        for name, part in zip(names if units else [level], shares, strict=True):
            levels[name] += part * sent * groups.size
    for sources, targets, sent in _between(plan):
        np.add.at(matrix, (sources // size, targets // size), sent)
        crossed = _crossed(sources, targets, units)
        for name, number in zip(
            names if units else [BETWEEN_STAGES], range(max(len(units), 1)), strict=True
        ):
            levels[name] += sent * int((crossed == number).sum())
    return Exchanges(
        matrix=matrix, size=size, levels={name: nbytes for name, nbytes in levels.items() if nbytes}
    )


def _block_size(devices: int, units: Sequence[int]) -> int:
    """The devices of a block: the fewest that fit the matrix, in whole units of the cluster."""
    least = -(-devices // MOST_BLOCKS)
    whole = max((unit for unit in units if unit <= least), default=1)
    return -(-least // whole) * whole


def _sums(plan: Plan, issued: Sequence[Issued]) -> dict[Group, float]:
    """The bytes that a device sends, by group.

    A group is (first device, mesh, axes, their levels, whether it sends in rings).
    """
    stages: Sequence[StagePlan | None] = plan.stages[: stages_of(plan)] or (None,)
    meshes = [stage.mesh if stage is not None else plan.mesh for stage in stages]
    starts = np.cumsum([0, *(int(np.prod([axis.size for axis in mesh])) for mesh in meshes)])
    sums: dict[Group, float] = defaultdict(float)
    for one in issued:
        mesh = meshes[one.stage]
        names = one.axis.split(JOINED)
        sizes = tuple(axis.size for axis in mesh)
        axes = tuple(i for i, axis in enumerate(mesh) if axis.name in names and axis.size > 1)
        if not axes:
            continue
        n = degree_of(axes, sizes)
        level = JOINED.join(dict.fromkeys(mesh[i].level for i in axes))
        share = 1.0 if one.kind == "send" else (2 if one.kind == "all_reduce" else 1) * (n - 1) / n
        key = (int(starts[one.stage]), sizes, axes, level, one.kind != "all_to_all")
        sums[key] += share * one.nbytes
    return sums


def _carry(groups: Integers, sent: float, ring: bool, matrix: Matrix, size: int) -> None:
    """Add each member's bytes: to the next one of its group, or to all others alike."""
    held = groups // size
    if ring:
        np.add.at(matrix, (held, np.roll(held, -1, axis=1)), sent)
        return
    counts = np.zeros((len(groups), len(matrix)))
    np.add.at(counts, (np.arange(len(groups))[:, None], held), 1.0)
    pairs = counts.T @ counts - np.diag(counts.sum(axis=0))  # a device sends nothing to itself
    matrix += sent / (groups.shape[1] - 1) * pairs


def _by_level(groups: Integers, ring: bool, units: Sequence[int]) -> list[float]:
    """The share of the bytes whose outermost level is each of the levels."""
    n = groups.shape[1]
    if ring:
        crossed = _crossed(groups, np.roll(groups, -1, axis=1), units)
        return [float((crossed == level).mean()) for level in range(len(units))]
    # All-to-all: pairs inside one unit of a level, less those inside one unit of a smaller level.
    inside = 0.0
    shares = []
    for unit in units:
        rows = np.arange(len(groups))[:, None] * (int(groups.max()) + 1)
        _, counts = np.unique(rows + groups // unit, return_counts=True)
        pairs = float((counts * (counts - 1)).sum()) / (groups.size * (n - 1))
        shares.append(pairs - inside)
        inside = pairs
    return shares


def _crossed(sources: Integers, targets: Integers, units: Sequence[int]) -> Integers:
    """The innermost level with a unit that contains both devices."""
    # The number of levels whose units separate the devices is the number of that level.
    levels = np.zeros(np.shape(sources), dtype=np.int64)
    for unit in units[:-1]:
        levels += sources // unit != targets // unit
    return levels


def _between(plan: Plan) -> Iterator[tuple[Integers, Integers, float]]:
    """The messages between stages: (senders, receivers, bytes of each in a step).

    In training gradients travel back the same way.
    """
    stages = stages_of(plan)
    devices = [stage.devices for stage in plan.stages[:stages]]
    starts = np.cumsum([0, *devices])
    for chunk, stage in enumerate(plan.stages[:-1]):
        here = chunk % stages
        there = (chunk + 1) % stages
        sources = starts[here] + np.arange(devices[here])
        targets = starts[there] + np.arange(devices[here]) * devices[there] // devices[here]
        sent = stage.handed * plan.schedule.micro_batches
        if here != there and sent:
            yield sources, targets, sent
            if plan.model.mode == "train":
                yield targets, sources, sent
