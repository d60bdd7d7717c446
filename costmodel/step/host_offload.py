"""Optimizer state in host memory, streamed through the device when its parameters are updated.

The state of the parameters of chunk i (`state_chunks.py`), s_i bytes, is copied in, their update
takes u_i on the device, and the state is copied out again. While one chunk is updated, the next
comes in and the one before goes out (three are on the device at once):

    in_i      ends  s_i / r  after  in_(i-1), update_(i-2), out_(i-3)
    update_i  ends  u_i      after  in_i, update_(i-1)
    out_i     ends  s_i / r  after  update_i, out_(i-1)

So a long stream takes the sum of max(u_i, s_i / r), and each parameter adds its term to the price
of a plan. r is `SHARE` of the link's nominal rate. ZeRO-Offload (Ren et al., arXiv:2101.06840)
moves gradients out, updates on the CPU and moves parameters in. Here the device updates, with the
same arithmetic as without offload and without a kernel for the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.device import Device
from autopar.ir import Tensor
from autopar.sharding.schedule import PLAIN, Types
from autopar.sharding.state_chunks import chunks

from .mesh_prices import optimizer_named, update_seconds

Floats = NDArray[np.float64]
SHARE = 0.5
"""Share of the nominal rate of the link to the host in each direction while all its devices copy in
and out at once.

Assumed: the GPUs of a DGX A100 share a switch in pairs, and 8 x 2 x 64 GB/s are more than the
memory of a host of two sockets gives (614 GB/s).
"""
ALIVE = 3
"""Chunks on the device at once: one comes in, one is used, one goes out."""
COPIES = 2
"""Launches of a parameter's copies, in and out, that are not hidden."""


def host_rate(device: Device) -> float:
    """B/s in each direction between a device and its host."""
    assert device.host_bandwidth is not None, "state is offered to hosts with a known link only"
    return SHARE * device.host_bandwidth


def state_bytes(
    tensor: Tensor, shards: NDArray[np.int64], optimizer: str, types: Types = PLAIN.types
) -> Floats:
    """Return the bytes of the optimizer's state of a parameter stored in 1 of `shards` shards.

    The result is an array [layouts].
    """
    states = optimizer_named(optimizer).states if tensor.trainable else 0
    return np.asarray(states * types.stored_bytes(tensor) / shards, dtype=np.float64)


def streamed_update(
    tensor: Tensor,
    shards: NDArray[np.int64],
    optimizer: str,
    cluster: Cluster,
    types: Types = PLAIN.types,
) -> Floats:
    """Return the seconds that a parameter's update adds to a stream: array [layouts].

    Its optimizer state is in host memory.
    """
    device = cluster.device
    copied = state_bytes(tensor, shards, optimizer, types) / host_rate(device)
    return (
        # Neighbouring chunks overlap in a long stream, so that only the longer of both counts.
        np.maximum(update_seconds(tensor, shards, optimizer, cluster, types), copied)
        + COPIES * device.launch
    )


def stream_seconds(updates: Sequence[float], sizes: Sequence[float], device: Device) -> float:
    """Return the seconds of updating parameters chunk by chunk.

    `updates`: seconds of each. `sizes`: bytes of their states on the host.
    """
    if not updates:
        return 0.0
    rate = host_rate(device)
    # The zeros stand for chunks before the first one.
    ins, done, outs = ([0.0] * ALIVE for _ in range(3))
    for chunk in chunks(sizes):
        copied = sum(sizes[chunk]) / rate
        # A chunk comes in where an earlier one went out, because `ALIVE` chunks fit at once.
        ins.append(max(ins[-1], done[-2], outs[-3]) + copied)
        done.append(max(ins[-1], done[-1]) + sum(updates[chunk]))
        outs.append(max(done[-1], outs[-1]) + copied)
    return outs[-1] + COPIES * len(updates) * device.launch


def streamed_bytes(sizes: Sequence[float]) -> float:
    """Bytes of the states that are on the device at once, at the most."""
    held = [sum(sizes[chunk]) for chunk in chunks(sizes)]
    return max((sum(held[i : i + ALIVE]) for i in range(len(held))), default=0.0)
