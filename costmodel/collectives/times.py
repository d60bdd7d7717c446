"""The cost of a collective: a backend's algorithms in its protocols, over a group's levels.

A step waits for one message; a byte crosses a port at the rate of a level and the memory of each
device. For a group of n on one level

    time = overhead + steps(n) * latency + bytes * (traffic(n) / rate + own(n) / copy bandwidth)

with the overhead of the level's protocol (a launch of the device if it has none). The least over
the algorithms and protocols of the backend (`backends`) is taken. `bytes` is the buffer of an
all-reduce, broadcast, reduce or send, the *output* of an all-gather or gather, the *input* of a
reduce-scatter or scatter, and the local input of an all-to-all. Groups over several levels:
`algorithm_lines`.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.costmodel.cluster.axis_binding import parse_span
from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.cluster.measured_collectives import Curve, Line
from autopar.costmodel.cluster.protocols import KINDS
from autopar.errors import ClusterError, unknown

from .algorithm_lines import Way, parts_of, ways
from .backends import TABLE
from .measured_curves import measured_curve


def lower_envelope(given: Iterable[Line]) -> list[Line]:
    """The lines that are the least for some number of bytes, from small to large.

    >>> lower_envelope([(1, 9), (3, 6), (4, 1), (5, 1)])
    [(1, 9), (4, 1)]
    """
    envelope: list[Line] = []
    for alpha, beta in sorted(set(given)):
        if envelope and beta >= envelope[-1][1]:
            continue
        # The last line is passed over where the new one is below it before it is below the one
        # before.
        while len(envelope) > 1 and _crossing(envelope[-2], (alpha, beta)) <= _crossing(
            envelope[-2], envelope[-1]
        ):
            envelope.pop()
        envelope.append((alpha, beta))
    return envelope


def _crossing(small: Line, large: Line) -> float:
    """The bytes from which the second line is the lower."""
    return (large[0] - small[0]) / (small[1] - large[1])


@functools.lru_cache(maxsize=4096)
def lines(kind: str, group: int, *, level: str, cluster: Cluster) -> tuple[Line, ...]:
    """Return the lines (seconds, seconds per byte) whose minimum is the time of a collective.

    They go from small messages to large ones. `level` is the text that `bind_axes` gives for the
    axis; `group` is the size of the axis. A group of one has one line of zeros.

    >>> from autopar.costmodel import load_cluster
    >>> cluster = load_cluster("dgx-a100")
    >>> for alpha, beta in lines("all_reduce", 8, level="nvlink", cluster=cluster):
    ...     print(f"{alpha * 1e6:.0f} us + {beta * 1e12:.2f} ps/B")
    23 us + 30.04 ps/B
    29 us + 10.44 ps/B
    225 us + 7.15 ps/B
    """
    if kind not in KINDS:
        raise ClusterError(unknown("collective", kind, KINDS))
    if group < 1:
        raise ClusterError(f"a group has at least one device, not {group}")
    parts = parts_of(cluster, parse_span(cluster, level, group))
    if not parts:
        return ((0.0, 0.0),)
    if (curve := _measured(kind, group, level, cluster)) is not None:
        return curve.lines
    return tuple(
        lower_envelope(
            way.line
            for way in ways(kind, TABLE[cluster.backend][kind], parts, launch=cluster.device.launch)
        )
    )


@functools.lru_cache(maxsize=4096)
def _measured(kind: str, group: int, level: str, cluster: Cluster) -> Curve | None:
    """The curve of a calibrated cluster, which overrules the table."""
    if group < 2 or not cluster.measured:
        return None
    return measured_curve(
        kind,
        group,
        level,
        cluster,
        lambda kind, group, level, other: lines(kind, group, level=level, cluster=other),
    )


def linear(kind: str, group: int, *, level: str, cluster: Cluster) -> Line:
    """Seconds and seconds per byte of the algorithm for large messages."""
    return lines(kind, group, level=level, cluster=cluster)[-1]


def collective_time(
    kind: str, nbytes: ArrayLike, group: int, *, level: str, cluster: Cluster
) -> NDArray[np.float64]:
    """Return the seconds of one collective of `nbytes` in each group of an axis at once.

    `nbytes`: a number or an array, by the convention at the top of this module.
    """
    sizes = np.asarray(nbytes, dtype=np.float64)
    # Written so that it refuses NaN too.
    if sizes.size and not float(sizes.min()) >= 0:
        raise ClusterError(
            f"the bytes of a collective cannot be negative or undefined: {sizes.min()}"
        )
    if (curve := _measured(kind, group, level, cluster)) is not None:
        return curve.seconds(sizes)
    times = [
        alpha + beta * sizes for alpha, beta in lines(kind, group, level=level, cluster=cluster)
    ]
    return np.asarray(functools.reduce(np.minimum, times), dtype=np.float64)


def fastest_way(kind: str, nbytes: float, group: int, *, level: str, cluster: Cluster) -> Way:
    """Return the algorithm and protocol that the table takes for a collective of `nbytes`.

    The group has two or more members.
    """
    if kind not in KINDS:
        raise ClusterError(unknown("collective", kind, KINDS))
    parts = parts_of(cluster, parse_span(cluster, level, group))
    options = ways(kind, TABLE[cluster.backend][kind], parts, launch=cluster.device.launch)
    return min(options, key=lambda way: way.line[0] + way.line[1] * nbytes)
