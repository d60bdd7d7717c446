"""Seconds of the updates of whole matrices (Muon): the owner's products, and what is sent.

An owner brings a matrix [m, n], m <= n, to norm 1, and then takes Newton-Schulz steps in bfloat16,

    A = X X^T                2 m^2 n operations
    B = b A + c A A          2 m^3
    X = a X + B X            2 m^2 n

each product by the device's kernels. A step of the training lasts as long as that of the rank whose
matrices take longest. The tables of the search have each matrix's share of the mean, which no
placement undercuts. A stage takes as long as the mean of its ranks, or its largest matrix.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from autopar.costmodel.device import Device
from autopar.costmodel.device.elementwise import memory_seconds, with_launch
from autopar.costmodel.device.kernel_seconds import product_seconds
from autopar.costmodel.device.products import Product
from autopar.ir import Tensor
from autopar.order.owners import ITEMSIZE, STEPS, Owners, matrices_on
from autopar.sharding.layout import Layout
from autopar.sharding.mesh import degree_of
from autopar.sharding.program import Collective

from .issuer import Issuer
from .mesh_prices import MeshPrices
from .reasons import Reason
from .streams import Streams

NORMALISED = 3 * ITEMSIZE
"""Bytes for each element that the norm reads, and that the division by it reads and writes."""
COPIED = 2
"""Times that a message's bytes are moved to put it together or to take it apart."""


def newton_schulz_seconds(rows: int, columns: int, device: Device) -> float:
    """Seconds of the update of one matrix at its owner."""
    short = min(rows, columns)
    long = max(rows, columns)
    outer = _product_seconds(short, short, long, device)
    square = _product_seconds(short, short, short, device)
    step = _product_seconds(short, long, short, device)
    normalised = with_launch(
        0.0, memory_seconds(NORMALISED * rows * columns, device), device, launches=2
    )
    return STEPS * (outer + square + step) + float(normalised)


def _product_seconds(m: int, n: int, k: int, device: Device) -> float:
    sizes = (np.array([float(size)]) for size in (1, m, n, k))
    batch, rows, columns, inner = sizes
    product = Product(batch=batch, m=rows, n=columns, k=inner)
    return float(product_seconds(product, "bfloat16", device, itemsize=ITEMSIZE)[0])


class Share(NamedTuple):
    """A device's share of the update of a parameter that is a matrix, or a batch of them.

    `products`: seconds of the mean rank. `largest`: of one whole matrix. `sent`: of its part of
    what all matrices send, by its bytes.
    """

    products: float
    largest: float
    sent: float

    @property
    def seconds(self) -> float:
        """Seconds where all owners have equal work."""
        return self.products + self.sent


def share_of(tensor: Tensor, layout: Layout, prices: MeshPrices) -> Share:
    """Return a device's share of the update of a parameter that is a matrix."""
    mesh = prices.mesh.shape
    count, split, copied = matrices_on(tensor, layout, mesh)
    rows, columns = tensor.shape[-2:]
    own = newton_schulz_seconds(rows, columns, prices.cluster.device)
    shards = degree_of(split, mesh)
    copies = degree_of(copied, mesh)
    sent = 0.0
    shard = ITEMSIZE * count * rows * columns / shards
    if split:
        # There and back.
        sent += 2 * prices.unit_share("all_to_all", split, math.ceil(shard / copies))
    # Copies of a shard each update a part of the matrices, and then tell one another.
    if copied:
        sent += prices.unit_share("all_gather", copied, math.ceil(shard))
    return Share(products=count * own / (shards * copies), largest=own, sent=sent)


def play_owners(owners: Owners, prices: MeshPrices, streams: Streams) -> None:
    """Play the exchanges of a mesh and the products of its slowest rank on `streams`."""
    issuer = Issuer(prices, streams, Reason.UPDATE)
    device = prices.cluster.device
    for collective in owners.gathers():
        _send(collective, issuer, device)
    streams.compute("matrices", "products", slowest_seconds(owners, device))
    for collective in owners.returns():
        _send(collective, issuer, device)


def slowest_seconds(owners: Owners, device: Device) -> float:
    """Seconds of the rank whose matrices take longest."""
    known = functools.cache(functools.partial(newton_schulz_seconds, device=device))
    return max(
        math.fsum(count * known(*shape) for shape, count in load.items()) for load in owners.loads
    )


def _send(collective: Collective, issuer: Issuer, device: Device) -> None:
    """Put a message together, wait for it, and take it apart."""
    streams = issuer.streams
    copied = with_launch(0.0, memory_seconds(COPIED * collective.nbytes, device), device)
    streams.compute(collective.tensor, "flatten", float(copied))
    streams.wait(issuer.started(collective))
    streams.compute(collective.tensor, "unflatten", float(copied))
