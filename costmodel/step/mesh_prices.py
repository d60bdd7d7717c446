"""Prices of the collectives of a mesh and of parameter storage, as arrays over layouts.

parameter   the optimizer's traffic over the stored shard
collective  the line of its algorithm, on the levels that its mesh axes span together
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.axis_binding import joint_span, parse_span
from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.cluster.measured_collectives import Line
from autopar.costmodel.collectives import collective_time, linear, lines
from autopar.costmodel.device.elementwise import update_traffic_seconds
from autopar.errors import UsageError, unknown
from autopar.ir import Tensor
from autopar.sharding.communication import Move, has_largest, operator_traffic
from autopar.sharding.matrices import MUON
from autopar.sharding.mesh import Axes, Mesh, degree_of
from autopar.sharding.program import Collective
from autopar.sharding.rules import Call
from autopar.sharding.schedule import PLAIN, UNIT_BYTES, Types
from autopar.sharding.strategies import Strategies

from .shared_cores import INTERRUPTION

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """The tensors that an optimizer keeps and moves.

    `states`: tensors of the parameter's size that it keeps. `traffic`: such tensors that an update
    reads and writes. Temporaries of its step: `alone` times the largest parameter if it takes them
    one by one (torch's for-loop), `together` times all gradients if it takes them at once (torch's
    foreach). `others`: the optimizer of all but matrices of hidden layers, if it is one of those.
    """

    states: int
    traffic: int
    alone: int = 0
    together: int = 0
    others: str | None = None

    @property
    def streams(self) -> bool:
        """Whether it keeps state, and updates parameters one after another."""
        return self.states > 0 and self.others is None


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(states=2, traffic=21, alone=2, together=1),
    "sgd": Optimizer(states=0, traffic=3),
    "momentum": Optimizer(states=1, traffic=8),
    "lamb": Optimizer(states=2, traffic=29, alone=2, together=1),
    # Momentum (3), what it leads to (3), its cast (1.5), decay (2) and the step (2.5); the update
    # itself is made of products (`matrix_updates.py`).
    MUON: Optimizer(states=1, traffic=12, others="adamw"),
    "none": Optimizer(states=0, traffic=0),
}


def optimizer_named(name: str) -> Optimizer:
    """The optimizer called `name`; an unknown name is an error that lists the valid ones."""
    if name not in OPTIMIZERS:
        raise UsageError(unknown("optimizer", name, OPTIMIZERS))
    return OPTIMIZERS[name]


def optimizer_of(tensor: Tensor, optimizer: str, matrices: frozenset[str]) -> str:
    """The optimizer that updates a parameter, where `matrices` are those of hidden layers."""
    others = optimizer_named(optimizer).others
    return optimizer if others is None or tensor.name in matrices else others


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPrices:
    """Prices of collectives over axes of a mesh on a cluster.

    Parameters travel in units of about `unit_bytes`. A group over several axes is priced as one
    axis of as many devices in the same places. `programs`: seconds of programs' collectives.
    `operators`: seconds of operators as they were decided (`estimate.step_seconds`), of the mesh,
    too.
    """

    cluster: Cluster
    mesh: Mesh
    unit_bytes: int = UNIT_BYTES
    known: dict[tuple[str, Axes, float], tuple[Line, ...]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    programs: dict[tuple[str, Axes, int, int], float] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    operators: dict[object, tuple[float, float, float]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @classmethod
    def of(cls, cluster: Cluster, mesh: Mesh, parameters: float) -> MeshPrices:
        """Prices for a model (or a stage of it) with `parameters` bytes of parameters."""
        alone = cls(cluster=cluster, mesh=mesh)
        return replace(alone, unit_bytes=unit_bytes(alone, parameters))

    def place(self, axes: Axes) -> tuple[int, str]:
        """The size of a group over `axes`, and the levels that it spans."""
        spanned = [self.mesh.axes[axis] for axis in axes]
        if len(spanned) == 1:
            return spanned[0].size, spanned[0].level
        return degree_of(axes, self.mesh.shape), joint_span(
            self.cluster, tuple((axis.level, axis.size) for axis in spanned)
        )

    def link(self, axes: Axes) -> str:
        """Return the outermost link that a group over `axes` sends over, which binds it."""
        return self.place(axes)[1].rpartition("+")[2].partition(":")[0]

    def uses(self, axes: Axes) -> dict[str, float]:
        """Return the links that a group over `axes` sends over, and how busy it keeps each.

        Rings and trees carry about all bytes over every level. The outermost binds; an inner one is
        busy for as long as a gather of the same bytes inside it takes.
        """
        size, level = self.place(axes)
        spans = parse_span(self.cluster, level, size)
        if len(spans) < 2:
            return {self.link(axes): 1.0}
        _, whole = linear("all_gather", size, level=level, cluster=self.cluster)
        return {
            one.name: min(
                linear("all_gather", count, level=one.name, cluster=self.cluster)[1] / whole, 1.0
            )
            if one is not spans[-1][0]
            else 1.0
            for one, count in spans
        }

    def lines(self, kind: str, axes: Axes) -> tuple[Line, ...]:
        """The (seconds, seconds per byte) lines of a collective over `axes`."""
        # Parts of units have a share above 0 in their key.
        key = (kind, axes, 0.0)
        if key not in self.known:
            size, level = self.place(axes)
            self.known[key] = tuple(
                (alpha + self.issued(size), beta)
                for alpha, beta in lines(kind, size, level=level, cluster=self.cluster)
            )
        return self.known[key]

    def unit_lines(self, kind: str, axes: Axes, whole: float = 0.0) -> tuple[Line, ...]:
        """Return the line of a parameter's part of a unit's message.

        Its share of latency is by bytes and by `SHARERS`. `whole`: bytes of the parameter; one of
        more than a unit is a message of its own, with one latency.
        """
        share = min(self.unit_bytes / whole, 1.0) if whole else 1.0
        key = (kind, axes, share)
        if key not in self.known:
            nbytes = self.unit_bytes
            # The backend chooses its algorithm for the whole message, not for a parameter's part of
            # it.
            alpha, beta = min(self.lines(kind, axes), key=lambda line: line[0] + line[1] * nbytes)
            self.known[key] = ((alpha / SHARERS, beta + share * alpha / nbytes),)
        return self.known[key]

    def unit_seconds(self, kind: str, axes: Axes, nbytes: int, whole: float = 0.0) -> float:
        """Seconds of a part of `nbytes` of a unit's message, of a parameter of `whole` bytes."""
        ((alpha, beta),) = self.unit_lines(kind, axes, whole)
        return alpha + beta * nbytes

    def share_of_unit(self, whole: int, kind: str, axes: Axes, nbytes: int) -> float:
        """Seconds of a parameter's part of one message of its unit.

        The message takes `unit_bytes` to where the parameter takes `whole` bytes, and more if the
        parameter alone has more: it is priced as it is sent, and shared by bytes.
        """
        times = max(self.unit_bytes / max(whole, 1), 1.0)
        return min(alpha / times + beta * nbytes for alpha, beta in self.lines(kind, axes))

    def unit_share(self, kind: str, axes: Axes, nbytes: int) -> float:
        """Return the seconds by the bytes alone.

        Parameters of all sizes then compare collectives in the same way.
        """
        ((_, beta),) = self.unit_lines(kind, axes)
        return beta * nbytes

    def seconds(self, kind: str, axes: Axes, nbytes: int) -> float:
        """Seconds of one collective of `nbytes` over `axes`."""
        size, level = self.place(axes)
        sent = float(collective_time(kind, nbytes, size, level=level, cluster=self.cluster))
        return self.issued(size) + sent

    def collective(self, collective: Collective) -> float:
        """Seconds of a collective of a program."""
        key = (collective.kind, collective.axes, collective.nbytes, collective.outermost)
        if key not in self.programs:
            first = collective.outermost
            hidden = first >= 0 and self.fans_out(first, collective.axes)
            self.programs[key] = 0.0 if hidden else self.seconds(*key[:3])
        return self.programs[key]

    def move(self, axes: Axes, move: Move) -> Floats:
        """Seconds of a collective inside an operator: array [strategies]."""
        size, level = self.place(axes)
        sent = collective_time(move.kind, move.nbytes, size, level=level, cluster=self.cluster)
        seconds = np.asarray(self.issued(size) + sent)
        if move.outermost is None:
            return seconds
        hidden = np.array([self.fans_out(axis, axes) for axis in range(len(self.mesh.axes))])
        return np.where(hidden[move.outermost], 0.0, seconds)

    def fans_out(self, first: int, axes: Axes) -> bool:
        """Whether kernels fan rows out over `axes` while others come over the axis `first`.

        Then only the messages over the slower link of that axis are seen.
        """
        if self.cluster.framework.kernels.dispatcher != "node":
            return False
        return self.link((first,)) != self.link(axes)

    def issued(self, size: int) -> float:
        """Seconds of the host for a collective of so many ranks; one rank alone issues none."""
        return self.cluster.host_seconds("collective") if size > 1 else 0.0


LATENCY = 1 / 8
"""Share of its transfer that the latency of a unit's message may be."""
SHARERS = 128
"""Parameters that share a message's latency, so that even a parameter of hardly any bytes has a
price.
"""
LEAST_UNIT = 2**20
LARGEST_UNIT = 2**29
"""The least and the most bytes of a unit."""


def unit_bytes(prices: MeshPrices, parameters: float) -> int:
    """Return the bytes of the units in which `parameters` bytes travel.

    They are a power of two, the largest over the axes of the mesh of

        U = min(8 a / b, sqrt(P a / b))      a, b: latency and seconds per byte of an all-gather
                                             P: `parameters`

    Latency is then an eighth of the transfer, and the last unit, which nothing hides, takes no
    longer than the latency of all. Where ranks compute on the cores that carry messages, their
    interruption counts as latency.
    """
    interrupted = INTERRUPTION if prices.cluster.shared_host else 0.0
    wanted = [
        _unit(
            [(alpha + interrupted, beta) for alpha, beta in prices.lines("all_gather", (number,))],
            parameters,
        )
        for number, axis in enumerate(prices.mesh.axes)
        if axis.size > 1
    ]
    if not any(wanted):
        return UNIT_BYTES
    return int(2 ** round(math.log2(min(max(*wanted, LEAST_UNIT), LARGEST_UNIT))))


def _unit(ways: Sequence[Line], parameters: float) -> float:
    """Return the unit size on one axis.

    It is that of the first algorithm that is still the fastest where its latency is that small.
    """
    for alpha, beta in sorted(ways, key=lambda line: line[0] / line[1]):
        nbytes = alpha / beta / LATENCY
        if all(alpha + beta * nbytes <= a + b * nbytes for a, b in ways):
            return min(nbytes, math.sqrt(parameters * alpha / beta))
    return 0.0


def communication_seconds(
    call: Call, strategies: Strategies, prices: MeshPrices, gradients: frozenset[str]
) -> Floats:
    """Return the seconds of the collectives that an operator issues inside itself.

    They are of both passes, an array [strategies].
    """
    seconds = np.zeros(len(strategies.choices))
    mesh = prices.mesh.shape
    talks = any(option.communication is not None for option in strategies.options)
    if talks or has_largest(call.operator):
        for rows, axes, traffic in operator_traffic(call, strategies, mesh, gradients):
            for move, count in _repeated(traffic):
                seconds[rows] += count * prices.move(axes, move)
    return seconds


def _repeated(traffic: Sequence[Move]) -> list[tuple[Move, int]]:
    """Collectives with the number of times that they are issued.

    A ring sends the same bytes as often as its group has further ranks.
    """
    counted: list[tuple[Move, int]] = []
    for move in traffic:
        for place, (known, count) in enumerate(counted):
            # The rounds of a ring hold the same array, so no values are compared.
            if known.kind == move.kind and known.nbytes is move.nbytes:
                counted[place] = (known, count + 1)
                break
        else:
            counted.append((move, 1))
    return counted


def update_seconds(
    tensor: Tensor,
    shards: NDArray[np.int64],
    optimizer: str,
    cluster: Cluster,
    types: Types = PLAIN.types,
) -> Floats:
    """Return the seconds of the optimizer's step on a parameter in 1 of `shards` shards.

    The result is an array [layouts].
    """
    traffic = optimizer_named(optimizer).traffic if tensor.trainable else 0
    nbytes = types.stored_bytes(tensor) * traffic * cluster.framework.update / shards
    busy = update_traffic_seconds(nbytes, cluster.device)
    return np.asarray(np.where(busy > 0, busy + cluster.host_seconds("update"), 0.0))


def storage_bytes(
    tensor: Tensor,
    shards: NDArray[np.int64],
    optimizer: str,
    *,
    train: bool,
    types: Types = PLAIN.types,
    moment: float | None = None,
) -> Floats:
    """Bytes of a stored parameter with its gradient and optimizer state: array [layouts].

    `moment`: bytes of an element of each of the optimizer's tensors (None: as it is stored).
    """
    if not train or not tensor.trainable:
        return np.asarray(tensor.own_bytes / shards, dtype=np.float64)
    stored = types.stored_bytes(tensor)
    # A gradient is summed in the type in which it travels, and cast to that of storage at the end:
    # the wider of both is allocated.
    states = optimizer_named(optimizer).states
    each = stored if moment is None or not types.casts(tensor) else moment * tensor.size
    whole = stored + states * each + max(stored, types.reduced_bytes(tensor))
    return np.asarray(whole / shards, dtype=np.float64)
