"""Prices of the parts of a plan, as arrays over strategies: operators, parameter storage, collectives of a mesh.

operator   time(flops, bytes) forward, and backward time(flops x inputs with a gradient, 2 bytes), on the local shapes
parameter  the optimizer's traffic over the stored shard
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.errors import UsageError, unknown
from autopar.ir import DTYPE_BYTES, Tensor
from autopar.sharding.candidates import Strategies
from autopar.sharding.communication import operator_traffic, visited
from autopar.sharding.mesh import Mesh
from autopar.sharding.notation import local_elements
from autopar.sharding.program import BUCKET_BYTES
from autopar.sharding.rules import RULES, Call

from .cluster import Cluster
from .collectives import Line, collective_time, lines
from .compute import operator_time

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """`states`: tensors of the parameter's size that it keeps; `traffic`: how many it reads and writes in an update."""

    states: int
    traffic: int


OPTIMIZERS: Mapping[str, Optimizer] = {
    "adamw": Optimizer(states=2, traffic=7),
    "sgd": Optimizer(states=0, traffic=3),
    "none": Optimizer(states=0, traffic=0),
}


def optimizer_named(name: str) -> Optimizer:
    """The optimizer called `name`; an unknown name is an error that lists the valid ones."""
    if name not in OPTIMIZERS:
        raise UsageError(unknown("optimizer", name, OPTIMIZERS))
    return OPTIMIZERS[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshPrices:
    """Collectives on the axes of a mesh whose levels are bound to a cluster."""

    cluster: Cluster
    mesh: Mesh

    def lines(self, kind: str, axis: int) -> tuple[Line, ...]:
        """The (seconds, seconds per byte) lines of a collective on `axis`."""
        place = self.mesh.axes[axis]
        return lines(kind, place.size, level=place.level, cluster=self.cluster)

    def bucket_share(self, kind: str, axis: int) -> tuple[Line, ...]:
        """The line of a collective that is part of a gradient bucket, of whose latency it bears its share."""
        alpha, beta = self.lines(kind, axis)[-1]
        return ((0.0, beta + alpha / BUCKET_BYTES),)

    def bucket_seconds(self, kind: str, axis: int, nbytes: int) -> float:
        """Seconds of one gradient's share of a bucket."""
        ((alpha, beta),) = self.bucket_share(kind, axis)
        return alpha + beta * nbytes

    def seconds(self, kind: str, axis: int, nbytes: int) -> float:
        """Seconds of one collective of `nbytes` on `axis`."""
        place = self.mesh.axes[axis]
        return float(collective_time(kind, nbytes, place.size, level=place.level, cluster=self.cluster))


def operator_seconds(
    call: Call, strategies: Strategies, mesh: tuple[int, ...], cluster: Cluster, gradients: frozenset[str]
) -> tuple[Floats, Floats]:
    """Forward and backward seconds of every strategy of an operator: two arrays [strategies]."""
    degrees = strategies.degrees(mesh)
    sizes = np.array([factor.size for factor in strategies.rule.factors], dtype=np.float64)
    local = sizes / degrees
    flops, smallest = _flops(call, strategies, local)
    nbytes = np.zeros(len(local)) if RULES[call.operator.kind].view else _traffic(call, strategies, local)
    dtype = (
        next((t.dtype for t in (*call.outputs, *call.inputs) if t.is_float), "float32")
        .replace("complex64", "float32")
        .replace("complex128", "float64")
    )
    device = cluster.device
    rounds = visited(strategies, mesh)
    forward = rounds * operator_time(flops, nbytes, dtype, device, smallest=smallest)
    if not any(t.name in gradients for t in call.outputs):
        return forward, np.zeros(len(local))
    products = sum(t.name in gradients for t in call.inputs) or 1
    return forward, rounds * operator_time(flops * products, 2 * nbytes, dtype, device, smallest=smallest)


def communication_seconds(call: Call, strategies: Strategies, prices: MeshPrices, gradients: frozenset[str]) -> Floats:
    """Seconds of the collectives that an operator issues inside itself, forward and backward: array [strategies]."""
    seconds = np.zeros(len(strategies.choices))
    mesh = prices.mesh.shape
    if any(option.communication is not None for option in strategies.options):
        for rows, axis, traffic in operator_traffic(call, strategies, mesh, gradients):
            place = prices.mesh.axes[axis]
            for move in traffic:
                seconds[rows] += collective_time(move.kind, move.nbytes, place.size, level=place.level, cluster=prices.cluster)
    return seconds


def _traffic(call: Call, strategies: Strategies, local: Floats) -> Floats:
    """Bytes read and written: every input and output once, in its local shape."""
    total = np.zeros(len(local))
    for tensor, dims in zip((*call.inputs, *call.outputs), (*strategies.rule.inputs, *strategies.rule.outputs), strict=True):
        total += local_elements(dims, local) * DTYPE_BYTES[tensor.dtype]
    return total


def _flops(call: Call, strategies: Strategies, local: Floats) -> tuple[Floats, Floats | None]:
    """Two for each multiply-add, and the smallest side of the local matrix product (None where there is none)."""
    rule = strategies.rule
    products = RULES[call.operator.kind].products
    flops = np.zeros(len(local))
    for left_out in products:
        members = [i for i, f in enumerate(rule.factors) if not f.name.startswith(tuple(left_out))]
        work = 2 * np.prod(local[:, members], axis=1)
        if left_out.startswith("/"):
            shared = [i for i, f in enumerate(rule.factors) if f.name.startswith(left_out[1:])]
            work *= np.prod(local[:, shared], axis=1) / math.prod(rule.factors[i].size for i in shared)
        flops += work
    if not products or len(rule.inputs) < 2:
        return flops, None
    tensors = [{f for dim in dims for f in dim} for dims in (*rule.inputs, rule.outputs[0])]
    matrices = [t for t in tensors[:-1] if len(t) > 1][:2] or tensors[:2]
    out = tensors[-1]
    sides = [[f for f in matrices[0] if f in out and f not in matrices[-1]], [f for f in matrices[-1] if f in out and f not in matrices[0]]]
    sides.append([f for f in matrices[0] & matrices[-1] if f not in out])
    return flops, functools.reduce(np.minimum, [np.prod(local[:, side], axis=1) for side in sides])


def update_seconds(tensor: Tensor, shards: NDArray[np.int64], optimizer: str, cluster: Cluster) -> Floats:
    """Seconds of the optimizer's step on a parameter stored in 1 of `shards` shards: array [layouts]."""
    traffic = optimizer_named(optimizer).traffic if tensor.trainable else 0
    nbytes = tensor.bytes * traffic / shards
    return operator_time(np.zeros(len(shards)), nbytes, tensor.dtype, cluster.device)


def storage_bytes(tensor: Tensor, shards: NDArray[np.int64], optimizer: str, *, train: bool) -> Floats:
    """Bytes of a stored parameter with its gradient and optimizer state: array [layouts]."""
    copies = 2 + optimizer_named(optimizer).states if train and tensor.trainable else 1
    return np.asarray(copies * tensor.bytes / shards, dtype=np.float64)
