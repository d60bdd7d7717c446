"""Owners of matrices: the rank that computes each whole matrix's update in a step.

An optimizer of matrices (Muon) looks at whole matrices, of which ranks hold shards or copies. Each
has an owner among the ranks that hold it. In the update of a step

    all-to-all    the shards of each matrix go to its owner, over the axes that split it
    ...           the owner computes the update of the whole matrix
    all-to-all    the shards of the update come back
    all-gather    copies of a shard share its updates, over the axes that do not split it

in 16 bits. Experts [experts, m, n] that are split by expert are whole there, along that axis.

Placing them is scheduling on equal machines, solved by longest processing time first: the largest
matrix not yet placed goes to the rank with the least work. The slowest rank then has at most
4/3 - 1/(3 ranks) times the work that it has at best (Graham, SIAM J. Appl. Math. 17, 1969).
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.ir import Tensor
from autopar.sharding.layout import Kind, Layout
from autopar.sharding.mesh import Axes, Mesh, degree_of
from autopar.sharding.program import Collective, Program

STEPS = 5
"""Newton-Schulz steps of an update, as Muon is defined."""
ITEMSIZE = 2
"""Bytes of an element of a matrix as it is sent and as its update is computed (bfloat16)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """A parameter's matrices on each rank, [m, n] as a whole, and the place of each one's owner.

    `split`, `copied`: the axes over which ranks hold shards and copies of them. A place is a number
    among the ranks over both, in the order of the mesh.
    """

    name: str
    rows: int
    columns: int
    split: Axes
    copied: Axes
    places: tuple[int, ...]

    @property
    def shared(self) -> Axes:
        """The axes over which ranks hold parts or copies of one matrix."""
        return tuple(sorted((*self.split, *self.copied)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """The messages of all parameters that are split over the same axes, and copied over the same.

    `sent`: elements that each rank sends to each owner. `shared`: elements that each copy gives.
    Both are the most of any rank, as messages of a group are equal.
    """

    split: Axes
    copied: Axes
    members: tuple[Owned, ...]
    sent: int
    shared: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Owners:
    """The owners of all matrices of a mesh."""

    mesh: Mesh
    exchanges: tuple[Exchange, ...]

    @property
    def loads(self) -> tuple[Counter[tuple[int, int]], ...]:
        """The matrices that each rank owns, by rows and columns."""
        loads = tuple(Counter[tuple[int, int]]() for _ in range(self.mesh.devices))
        for exchange in self.exchanges:
            shared = tuple(sorted((*exchange.split, *exchange.copied)))
            for group in self.mesh.groups(shared):
                for owned in exchange.members:
                    for place in owned.places:
                        loads[group[place]][owned.rows, owned.columns] += 1
        return loads

    @property
    def imbalance(self) -> float:
        """The work of the slowest rank over that which it has at least: 1 is an optimum.

        At least it has the mean of all ranks, and the largest matrix.
        """
        work = [
            sum(count * multiply_adds(*shape) for shape, count in load.items())
            for load in self.loads
        ]
        largest = max((multiply_adds(*shape) for load in self.loads for shape in load), default=0)
        least = max(math.fsum(work) / len(work), largest)
        return max(work) / least if least else 1.0

    def gathers(self) -> tuple[Collective, ...]:
        """The collectives that bring shards to owners."""
        return tuple(
            self._collective("all_to_all", exchange, exchange.split, exchange.sent)
            for exchange in self.exchanges
            if exchange.split
        )

    def returns(self) -> tuple[Collective, ...]:
        """The collectives that bring updates from owners to all ranks."""
        messages: list[Collective] = []
        for exchange in self.exchanges:
            if exchange.split:
                messages.append(
                    self._collective("all_to_all", exchange, exchange.split, exchange.sent)
                )
            if exchange.copied:
                messages.append(
                    self._collective("all_gather", exchange, exchange.copied, exchange.shared)
                )
        return tuple(messages)

    def _collective(self, kind: str, exchange: Exchange, axes: Axes, elements: int) -> Collective:
        return Collective(
            phase="update",
            kind=kind,
            axes=axes,
            nbytes=ITEMSIZE * elements * degree_of(axes, self.mesh.shape),
            tensor=exchange.members[0].name,
        )


def multiply_adds(rows: int, columns: int) -> int:
    """Multiply-adds of the update of one matrix.

    >>> multiply_adds(2, 3) == 5 * (2 * 2 * 3 + 2 * 2 * 2 + 2 * 2 * 3)
    True
    """
    short = min(rows, columns)
    long = max(rows, columns)
    return STEPS * (2 * short * short * long + short**3)


def program_owners(program: Program) -> Owners:
    """The owners of the matrices that a program stores."""
    return owners_of(program.assignment.mesh, owned_tensors(program), program.assignment.storage)


def owned_tensors(program: Program, matrices: frozenset[str] | None = None) -> tuple[Tensor, ...]:
    """The matrices that a program stores and trains, in the order of the model.

    `matrices`: those of the model, if the program's optimizer has others.
    """
    assignment = program.assignment
    whole = assignment.matrices if matrices is None else matrices
    return tuple(
        tensor
        for tensor in program.graph.parameters
        if tensor.name in whole
        and tensor.name in assignment.gradients
        and tensor.name in assignment.storage
    )


def owners_of(mesh: Mesh, matrices: Sequence[Tensor], storage: Mapping[str, Layout]) -> Owners:
    """Place these matrices on the ranks of a mesh; equal input gives equal owners."""
    spans = [matrices_on(tensor, storage[tensor.name], mesh.shape) for tensor in matrices]
    jobs = tuple(
        (count, multiply_adds(*tensor.shape[-2:]), tuple(sorted((*split, *copied))))
        for tensor, (count, split, copied) in zip(matrices, spans, strict=True)
    )
    by_axes: dict[tuple[Axes, Axes], list[Owned]] = {}
    placed = zip(matrices, spans, _longest_first(mesh.shape, jobs), strict=True)
    for tensor, (_, split, copied), places in placed:
        rows, columns = tensor.shape[-2:]
        owned = Owned(
            name=tensor.name, rows=rows, columns=columns, split=split, copied=copied, places=places
        )
        by_axes.setdefault((split, copied), []).append(owned)
    # Messages of a group of ranks are few and long: all its matrices travel together.
    exchanges = tuple(
        _exchange(mesh.shape, split, copied, members)
        for (split, copied), members in by_axes.items()
    )
    return Owners(mesh=mesh, exchanges=exchanges)


def matrices_on(tensor: Tensor, layout: Layout, mesh: Sequence[int]) -> tuple[int, Axes, Axes]:
    """A rank's number of matrices, and the axes over which each is split and copied."""
    batched = len(tensor.shape) > 2
    count = tensor.shape[0] if batched else 1
    split: list[int] = []
    copied: list[int] = []
    for axis, placement in enumerate(layout):
        # An axis of one device neither cuts nor copies.
        if mesh[axis] == 1:
            continue
        if placement.kind is not Kind.SPLIT:
            copied.append(axis)
        elif batched and placement.dim == 0:
            # A split by expert leaves every matrix whole, and each rank with fewer of them.
            count //= mesh[axis]
        else:
            split.append(axis)
    return count, tuple(split), tuple(copied)


@functools.lru_cache(maxsize=64)
def _longest_first(
    mesh: tuple[int, ...], jobs: tuple[tuple[int, int, Axes], ...]
) -> tuple[tuple[int, ...], ...]:
    """The places of the owners of each job's matrices.

    A job is a number of matrices, the work of each, and the axes over which it may be placed. Along
    the other axes every rank has as many matrices of its own.
    """
    # Sums of whole numbers, which float64 holds exactly: equal input gives equal places.
    loads = np.zeros(mesh, dtype=np.float64)
    places: list[tuple[int, ...]] = [()] * len(jobs)
    # Equal work is placed in the order of the model.
    for number in sorted(range(len(jobs)), key=lambda number: -jobs[number][1]):
        count, work, axes = jobs[number]
        others = tuple(axis for axis in range(len(mesh)) if axis not in axes)
        own: list[int] = []
        for _ in range(count):
            # Ranks that differ in other axes each get a matrix of their own at this place, so the
            # busiest of them is what counts.
            heaviest = loads.max(axis=others) if others else loads
            # Of equally busy places it is the first, on every rank and in every process.
            place = int(heaviest.argmin())
            own.append(place)
            at: list[int | slice] = [slice(None)] * len(mesh)
            where = np.unravel_index(place, heaviest.shape)
            for axis, position in zip(axes, where, strict=True):
                at[axis] = int(position)
            loads[tuple(at)] += work
        places[number] = tuple(own)
    return tuple(places)


def _exchange(mesh: Sequence[int], split: Axes, copied: Axes, members: Sequence[Owned]) -> Exchange:
    shards = degree_of(split, mesh)
    sent = Counter[int]()
    shared = Counter[int]()
    for owned in members:
        for place in owned.places:
            elements = owned.rows * owned.columns // shards
            sent[place] += elements
            shared[copy_of(owned, place, mesh)] += elements
    # Messages to all ranks of a group have one length, which backends move fastest.
    return Exchange(
        split=split,
        copied=copied,
        members=tuple(members),
        sent=max(sent.values()),
        shared=max(shared.values()),
    )


def copy_of(owned: Owned, place: int, mesh: Sequence[int]) -> int:
    """The number of a place among the copies of its shard."""
    return _number(owned, place, mesh, owned.copied)


def shard_of_place(owned: Owned, place: int, mesh: Sequence[int]) -> int:
    """The number of a place among the shards of its copy."""
    return _number(owned, place, mesh, owned.split)


def _number(owned: Owned, place: int, mesh: Sequence[int], axes: Axes) -> int:
    shared = owned.shared
    if not shared:
        return 0
    at = np.unravel_index(place, [mesh[axis] for axis in shared])
    own = [int(at[shared.index(axis)]) for axis in axes]
    return int(np.ravel_multi_index(own, [mesh[axis] for axis in axes])) if axes else 0
