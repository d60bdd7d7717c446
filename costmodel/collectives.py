"""What a collective costs: a table of algorithms, each a number of steps and of bytes, laid over the levels that its group spans.

A step waits for one message (the latency of a level), a byte crosses a port at the rate of a level. For a group of n on one level

    time = launch + steps(n) * latency + traffic(n) * bytes / rate

with `bytes` the buffer of an all-reduce, broadcast, reduce or send, the *output* of an all-gather or gather (all that is gathered), the
*input* of a reduce-scatter or scatter (all that is scattered), and the local input of an all-to-all. An algorithm is laid over several
levels in one of these ways:

- `nested` (NCCL): level by level. A device takes part on an outer level with its share of the bytes only: on level l it moves
  traffic(n_l) * bytes / (members inside). The levels work on different chunks at once, so the slowest bounds the time; their steps add up.
- `flat` (Gloo): one ring or tree over all members, with traffic(n) on every level; each step waits for the slowest.
- `direct`: each member sends to its peers; on level l move the bytes for the peers that are reached through it.
- `message`: between two members that are farthest apart.

All groups of an axis communicate at once (that is what one program on all ranks does), so devices that share a port (`Level.shared_by`)
divide it: in `nested`, `direct` and `message` every device drives it; in `flat` one member of each group in the unit does.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autopar.errors import ClusterError, unknown

from .cluster import Cluster, Level, parse_span
from .derived import measured_curve
from .measured import Curve

Span = tuple[tuple[Level, int], ...]
Line = tuple[float, float]  # seconds, seconds per byte

# As fractions (1) of the rate that a ring reaches:
# the protocol for small messages: all-reduce of 32 to 512 KiB on 8 x A100 grows by 36.6 us, twice those bytes at 26.8 GB/s, where the ring
# reaches 234.9 GB/s (stas00/ml-engineering@744d01e1:network/README.md lines 1222-1241);
SMALL_MESSAGE_RATE = 0.114
# reduction in the switch: 276 GB/s on 8 x H100, which move 9/8 of the buffer, where the ring reaches 367 GB/s on 8 x H200
# (awslabs/awsome-distributed-training@0edaf152, p5; stas00/ml-engineering@744d01e1:network/README.md lines 976-981).
IN_SWITCH_RATE = 0.85
# Steps (1) of a reduction in the switch: all-reduce of 512 KiB on 8 x H100 takes 21 us (the same p5 table) at 2.2 us a step.
IN_SWITCH_STEPS = 8
# Peers that NCCL serves at once in an all-to-all (1; recalled from its point-to-point scheduling).
PEERS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Steps, and bytes that the busiest port moves as a multiple of the collective's bytes, in a group of n; how it is laid over levels."""

    name: str
    layout: str
    steps: Callable[[int], float]
    traffic: Callable[[int], float]
    feature: str | None = None  # of the level that it needs


def _log2(n: int) -> int:
    return (n - 1).bit_length()


def _share(n: int) -> float:
    return (n - 1) / n


def _ring(rounds: int, layout: str = "nested") -> Algorithm:
    """`rounds` times around: once to gather or to scatter the reduction, twice for both."""
    return Algorithm(name="ring", layout=layout, steps=lambda n: rounds * (n - 1), traffic=lambda n: rounds * _share(n))


_TREE = Algorithm(name="double tree", layout="nested", steps=lambda n: 2 * _log2(n), traffic=lambda n: 2 / SMALL_MESSAGE_RATE)
_IN_SWITCH = Algorithm(
    name="in-switch",
    layout="nested",
    steps=lambda n: IN_SWITCH_STEPS,
    traffic=lambda n: (1 + 1 / n) / IN_SWITCH_RATE,
    feature="in_switch",
)
_CHAIN = Algorithm(name="pipelined chain", layout="nested", steps=lambda n: n - 1, traffic=lambda n: 1.0)
_PEERS = Algorithm(name="peer to peer", layout="direct", steps=lambda n: math.ceil((n - 1) / PEERS_AT_ONCE), traffic=_share)
_ALL_AT_ONCE = Algorithm(name="all at once", layout="direct", steps=lambda n: 1, traffic=_share)
_MESSAGE = Algorithm(name="message", layout="message", steps=lambda n: 1, traffic=lambda n: 1.0)

TABLE: Mapping[str, Mapping[str, tuple[Algorithm, ...]]] = {
    "nccl": {
        "all_reduce": (_ring(2), _TREE, _IN_SWITCH),
        "all_gather": (_ring(1),),
        "reduce_scatter": (_ring(1),),
        "all_to_all": (_PEERS,),
        "broadcast": (_CHAIN,),
        "reduce": (_CHAIN,),
        "gather": (_PEERS,),
        "scatter": (_PEERS,),
        "send": (_MESSAGE,),
        "barrier": (Algorithm(name="double tree", layout="nested", steps=lambda n: 2 * _log2(n), traffic=lambda n: 0.0),),
    },
    "gloo": {
        "all_reduce": (_ring(2, "flat"),),
        "all_gather": (_ring(1, "flat"),),
        # Gloo reduces the whole buffer and keeps a part of it.
        "reduce_scatter": (_ring(2, "flat"),),
        "all_to_all": (_ALL_AT_ONCE,),
        "broadcast": (Algorithm(name="binomial tree", layout="flat", steps=_log2, traffic=_log2),),
        "reduce": (Algorithm(name="ring and gather", layout="flat", steps=lambda n: n, traffic=lambda n: 2 * _share(n)),),
        "gather": (_ALL_AT_ONCE,),
        "scatter": (_ALL_AT_ONCE,),
        "send": (_MESSAGE,),
        "barrier": (Algorithm(name="dissemination", layout="flat", steps=_log2, traffic=lambda n: 0.0),),
    },
}
KINDS = tuple(TABLE["nccl"])


@dataclass(frozen=True, slots=True, kw_only=True)
class _Part:
    """One level of a span: its branches, the members of the group inside a branch, the devices inside a branch."""

    level: Level
    branches: int
    members: int
    devices: int

    def seconds_per_byte(self, drivers: float) -> float:
        """Of a device, where `drivers` of the devices that share a port use it at once."""
        return max(drivers, 1.0) / self.level.rate(self.branches)

    @property
    def sharing(self) -> int:
        """Devices that share a port here."""
        return min(self.level.shared_by, self.devices)


def _parts(cluster: Cluster, span: Span) -> tuple[_Part, ...]:
    inside = dict(zip((level.name for level in cluster.levels), (1, *cluster.units), strict=False))
    members = itertools.accumulate((branches for _, branches in span), lambda a, b: a * b, initial=1)
    return tuple(
        _Part(level=level, branches=branches, members=before, devices=inside[level.name])
        for (level, branches), before in zip(span, members, strict=False)
    )


def _nested(choice: tuple[Algorithm, ...], parts: tuple[_Part, ...]) -> Line:
    steps = sum(algorithm.steps(part.branches) * part.level.latency for algorithm, part in zip(choice, parts, strict=True))
    rates = (
        algorithm.traffic(part.branches) / part.members * part.seconds_per_byte(part.sharing)
        for algorithm, part in zip(choice, parts, strict=True)
    )
    return steps, max(rates)


def _flat(algorithm: Algorithm, parts: tuple[_Part, ...]) -> Line:
    group = math.prod(part.branches for part in parts)
    latency = max(part.level.latency for part in parts)
    slowest = max(part.seconds_per_byte(part.sharing / part.members) for part in parts)
    return algorithm.steps(group) * latency, algorithm.traffic(group) * slowest


def _direct(algorithm: Algorithm, parts: tuple[_Part, ...]) -> Line:
    group = math.prod(part.branches for part in parts)
    peers = [(part.branches - 1) * part.members for part in parts]
    steps = max(algorithm.steps(count + 1) * part.level.latency for count, part in zip(peers, parts, strict=True))
    rates = (count / group * part.seconds_per_byte(part.sharing) for count, part in zip(peers, parts, strict=True))
    return steps, max(rates)


def _message(algorithm: Algorithm, parts: tuple[_Part, ...]) -> Line:
    outer = parts[-1]
    return algorithm.steps(2) * outer.level.latency, algorithm.traffic(2) * outer.seconds_per_byte(outer.sharing)


_LAID: Mapping[str, Callable[[Algorithm, tuple[_Part, ...]], Line]] = {"flat": _flat, "direct": _direct, "message": _message}


def _candidates(algorithms: tuple[Algorithm, ...], parts: tuple[_Part, ...]) -> list[Line]:
    """One line for each way to run: nested algorithms are chosen level by level."""
    nested = [algorithm for algorithm in algorithms if algorithm.layout == "nested"]
    usable = [[algorithm for algorithm in nested if algorithm.feature in (None, *part.level.features)] for part in parts]
    found = [_nested(choice, parts) for choice in itertools.product(*usable)]
    return found + [_LAID[algorithm.layout](algorithm, parts) for algorithm in algorithms if algorithm.layout != "nested"]


@functools.lru_cache(maxsize=4096)
def lines(kind: str, group: int, *, level: str, cluster: Cluster) -> tuple[Line, ...]:
    """The straight lines (seconds, seconds per byte) whose minimum is the time, from the one for small messages to the one for large.

    `level` is the text that `bind_axes` gives for the axis; `group` is the size of the axis. A group of one: one line of zeros.

    >>> from autopar.costmodel import load_cluster
    >>> cluster = load_cluster("dgx-a100")
    >>> [f"{alpha * 1e6:.0f} us + {beta * 1e12:.2f} ps/B" for alpha, beta in lines("all_reduce", 8, level="nvlink", cluster=cluster)]
    ['41 us + 74.97 ps/B', '89 us + 7.48 ps/B']
    """
    if kind not in KINDS:
        raise ClusterError(unknown("collective", kind, KINDS))
    if group < 1:
        raise ClusterError(f"a group has at least one device, not {group}")
    parts = _parts(cluster, parse_span(cluster, level, group))
    if not parts:
        return ((0.0, 0.0),)
    if (curve := _measured(kind, group, level, cluster)) is not None:
        return curve.lines
    kept: list[Line] = []
    for alpha, beta in sorted(set(_candidates(TABLE[cluster.backend][kind], parts))):
        if not kept or beta < kept[-1][1]:
            kept.append((alpha, beta))
    return tuple((cluster.device.launch + alpha, beta) for alpha, beta in kept)


@functools.lru_cache(maxsize=4096)
def _measured(kind: str, group: int, level: str, cluster: Cluster) -> Curve | None:
    """The curve of a calibrated cluster, which goes before the table."""
    if group < 2 or not cluster.measured:
        return None
    return measured_curve(kind, group, level, cluster, lambda kind, group, level, other: lines(kind, group, level=level, cluster=other))


def linear(kind: str, group: int, *, level: str, cluster: Cluster) -> Line:
    """Seconds and seconds per byte of the algorithm for large messages."""
    return lines(kind, group, level=level, cluster=cluster)[-1]


def collective_time(kind: str, nbytes: ArrayLike, group: int, *, level: str, cluster: Cluster) -> NDArray[np.float64]:
    """Seconds of one collective of `nbytes` (a number or an array; the module says of what) in each group of an axis, all at once."""
    sizes = np.asarray(nbytes, dtype=np.float64)
    if sizes.size and not float(sizes.min()) >= 0:
        raise ClusterError(f"the bytes of a collective cannot be negative or undefined: {sizes.min()}")
    if (curve := _measured(kind, group, level, cluster)) is not None:
        return curve.seconds(sizes)
    times = [alpha + beta * sizes for alpha, beta in lines(kind, group, level=level, cluster=cluster)]
    return np.asarray(functools.reduce(np.minimum, times), dtype=np.float64)
