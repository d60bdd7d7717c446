"""Messages between neighbouring stages of a pipeline: the level that they cross, their seconds."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.costmodel.collectives import collective_time
from autopar.errors import ClusterError

from .cluster import Cluster
from .level import ALONE


def crossing(cluster: Cluster, start: int, stop: int) -> tuple[Cluster, str]:
    """Return the innermost level that joins devices `start` to `stop - 1`, and its pool.

    The pool may be the whole cluster. If these are the devices of two neighbouring stages, some
    message between them crosses this level, and none a level further outside.

    >>> from autopar.costmodel import load_cluster
    >>> cluster = load_cluster("dgx-h100").sized(16)
    >>> [crossing(cluster, *ends)[1] for ends in ((0, 4), (4, 8), (4, 12), (3, 4))]
    ['nvlink', 'nvlink', 'nic', 'device']
    """
    for first, pool in zip(cluster.starts, cluster.joined, strict=False):
        if first <= start and stop <= first + pool.devices:
            return crossing(pool, start - first, stop - first)
    if stop - start == 1:
        return cluster, ALONE
    if start < 0 or not start < stop <= cluster.devices:
        raise ClusterError(
            f"cluster {cluster.name!r}: of {cluster.devices} devices there are no {start} to "
            f"{stop - 1}"
        )
    names = zip(cluster.levels, cluster.units, strict=True)
    return cluster, next(level.name for level, unit in names if start // unit == (stop - 1) // unit)


def send_seconds(
    cluster: Cluster, nbytes: ArrayLike, *, level: str, senders: int | None = None
) -> NDArray[np.float64]:
    """Return the seconds of a message of `nbytes` from one device to another over `level`.

    `nbytes`: a number or an array. `senders`: the number of a unit's devices that send over the
    level at once and so divide their shared port (None: all).
    """
    if level == ALONE:
        return np.zeros_like(nbytes, dtype=np.float64)
    sending = cluster if senders is None else _driven(cluster, level, senders)
    return collective_time("send", nbytes, 2, level=level, cluster=sending)


@functools.lru_cache(maxsize=4096)
def _driven(cluster: Cluster, level: str, senders: int) -> Cluster:
    """The cluster with at most `senders` devices on a port of the level."""
    levels = tuple(
        replace(one, shared_by=min(one.shared_by, senders)) if one.name == level else one
        for one in cluster.levels
    )
    return replace(cluster, levels=levels)
