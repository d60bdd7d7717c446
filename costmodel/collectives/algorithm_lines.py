"""Algorithms of a backend laid over the levels that a group spans: seconds, seconds per byte.

In a group of N with n branches on a level and m members inside a branch:

- `channels` (NCCL's rings): one ring over all members, in as many copies as a branch has members.
  Each copy leaves the branch by another member's port: on every level traffic(N) * bytes / m. Of a
  ring's N hops, those between branches take the outer latency.
- `nested` (NCCL's trees, the switch): level by level, outside with a share of the bytes: traffic(n)
  * bytes / m. The levels work on different chunks at once, so the slowest bounds the time; their
  steps add up.
- `flat` (Gloo): one ring or tree over all members, with traffic(N) on every level; each step waits
  for the slowest.
- `direct`: each member sends to its peers; a level carries the bytes for the peers reached through
  it. On rails, bytes for another place of another unit first pass the level inside.
- `message`: between two members that are farthest apart.

All groups of an axis communicate at once, since all ranks run one program. So devices that share a
port (`Level.shared_by`) divide it: in `channels`, `nested`, `direct` and `message` every device
drives it; in `flat` one member of each group in the unit does.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from autopar.costmodel.cluster.cluster import Cluster
from autopar.costmodel.cluster.level import Level
from autopar.costmodel.cluster.measured_collectives import Line
from autopar.costmodel.cluster.protocols import Protocol

from .algorithm import Algorithm, share

Span = tuple[tuple[Level, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One level of a span: its branches, members and devices in a branch, and the protocol.

    `members`: those of the group in a branch. `devices`: all in a branch.
    """

    level: Level
    branches: int
    members: int
    devices: int
    protocol: Protocol

    def seconds_per_byte(self, drivers: float, *, exchanging: bool = False) -> float:
        """Return the seconds per byte of a device, if `drivers` devices use the port at once."""
        return max(drivers, 1.0) / self.level.rate(
            self.branches, self.protocol.efficiency, exchanging=exchanging
        )

    @property
    def hop(self) -> float:
        """Seconds of a message between any two branches: on a wiring it takes several hops."""
        return self.protocol.latency * (
            1.0 if self.level.wiring is None else self.level.wiring.reach(self.branches).hops
        )

    @property
    def sharing(self) -> int:
        """Devices that share a port here."""
        return min(self.level.shared_by, self.devices)


Parts = tuple[Part, ...]


def parts_of(cluster: Cluster, span: Span) -> Parts:
    """The levels of a span, each in the protocol that its own latency and efficiency make."""
    inside = dict(zip((level.name for level in cluster.levels), (1, *cluster.units), strict=False))
    members = itertools.accumulate(
        (branches for _, branches in span), lambda a, b: a * b, initial=1
    )
    return tuple(
        Part(
            level=level,
            branches=branches,
            members=before,
            devices=inside[level.name],
            protocol=level.plain,
        )
        for (level, branches), before in zip(span, members, strict=False)
    )


def _channels(choice: tuple[Algorithm, ...], parts: Parts) -> Line:
    algorithm = choice[0]
    group = math.prod(part.branches for part in parts)
    # Of the hops of a ring, those between units of a level, and of these the ones that cross a
    # level further outside.
    units = [group // (part.members * part.branches) for part in parts]
    crossing = [
        group // part.members - (units[i] if units[i] > 1 else 0) for i, part in enumerate(parts)
    ]
    # In a round a part takes all hops of the ring but one.
    crossing[0] -= 1
    rounds = algorithm.steps(group) / (group - 1)
    steps = sum(
        rounds * hops * part.protocol.latency for hops, part in zip(crossing, parts, strict=True)
    )
    return steps, max(
        algorithm.traffic(group) / part.members * part.seconds_per_byte(part.sharing)
        for part in parts
    )


def _nested(choice: tuple[Algorithm, ...], parts: Parts) -> Line:
    steps = 0.0
    rates = []
    for algorithm, part in zip(choice, parts, strict=True):
        # A branch of one device is the inside of a node, where NCCL's trees are chains.
        count = (
            algorithm.inner_steps
            if algorithm.inner_steps is not None and part.devices == 1
            else algorithm.steps
        )
        steps += count(part.branches) * part.protocol.latency
        rates.append(
            algorithm.traffic(part.branches) / part.members * part.seconds_per_byte(part.sharing)
        )
    return steps, max(rates)


def _flat(choice: tuple[Algorithm, ...], parts: Parts) -> Line:
    algorithm = choice[0]
    group = math.prod(part.branches for part in parts)
    latency = max(part.protocol.latency for part in parts)
    # Of a group's members in a unit one at a time sends out of it, the others to each other.
    slowest = max(part.seconds_per_byte(part.sharing / part.members) for part in parts)
    return algorithm.steps(group) * latency, algorithm.traffic(group) * slowest


def _direct(choice: tuple[Algorithm, ...], parts: Parts) -> Line:
    algorithm = choice[0]
    group = math.prod(part.branches for part in parts)
    peers = [(part.branches - 1) * part.members for part in parts]
    steps = max(
        algorithm.steps(count + 1) * part.hop for count, part in zip(peers, parts, strict=True)
    )
    # Bytes for another rail first go to it inside the unit.
    detours = [0.0] * len(parts)
    for i, part in enumerate(parts[1:]):
        detours[i] += peers[i + 1] * share(part.members) if "rails" in part.level.features else 0.0
    rates = (
        (count + detour) / group * part.seconds_per_byte(part.sharing, exchanging=True)
        for count, detour, part in zip(peers, detours, parts, strict=True)
    )
    return steps, max(rates)


def _message(choice: tuple[Algorithm, ...], parts: Parts) -> Line:
    algorithm = choice[0]
    outer = parts[-1]
    return algorithm.steps(2) * outer.hop, algorithm.traffic(2) * outer.seconds_per_byte(
        outer.sharing, exchanging=True
    )


_LAID: Mapping[str, Callable[[tuple[Algorithm, ...], Parts], Line]] = {
    "channels": _channels,
    "nested": _nested,
    "flat": _flat,
    "direct": _direct,
    "message": _message,
}
Choice = tuple[tuple[Algorithm, Protocol], ...]


def _per_level(kind: str, algorithms: tuple[Algorithm, ...], parts: Parts) -> Iterator[Choice]:
    """Choices of an algorithm and a protocol for each level.

    Algorithms are mixed only where they nest; protocols are not mixed if both levels have the same
    one.
    """
    for layout in dict.fromkeys(algorithm.layout for algorithm in algorithms):
        # `apart`: a group with several members in a unit cannot run it.
        usable = [
            a
            for a in algorithms
            if a.layout == layout and not (a.apart and (len(parts) > 1 or parts[0].devices == 1))
        ]
        options = [
            [
                (a, protocol)
                for a in usable
                if a.feature in (None, *part.level.features)
                for protocol in part.level.protocols_for(kind, a.name)
            ]
            for part in parts
        ]
        available = [{protocol.partner for _, protocol in option} for option in options]
        for choice in itertools.product(*options):
            names = [protocol.partner for _, protocol in choice]
            same = all(
                a == b or (a not in available[j] and b not in available[i])
                for (i, a), (j, b) in itertools.combinations(enumerate(names), 2)
            )
            alike = layout == "nested" or len({a.name for a, _ in choice}) == 1
            if same and alike:
                yield choice


def plain_line(algorithm: Algorithm, parts: Parts) -> Line:
    """Return the line of one algorithm on levels in the protocols that they have."""
    return _LAID[algorithm.layout]((algorithm,), parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to run a collective: its algorithms and protocols by level, and its line."""

    name: str
    line: Line


def ways(kind: str, algorithms: tuple[Algorithm, ...], parts: Parts, *, launch: float) -> list[Way]:
    """Return every way to run one of `algorithms` over the levels.

    Without any protocol, the start takes a `launch` in seconds.
    """
    options = []
    group = math.prod(part.branches for part in parts)
    for choice in _per_level(kind, algorithms, parts):
        chosen = tuple(algorithm for algorithm, _ in choice)
        placed = tuple(
            replace(part, protocol=protocol)
            for part, (_, protocol) in zip(parts, choice, strict=True)
        )
        alpha, beta = _LAID[chosen[0].layout](chosen, placed)
        # The fitted overhead of a protocol includes the launch.
        started = any(
            protocol != part.level.plain for part, (_, protocol) in zip(parts, choice, strict=True)
        )
        overhead = sum(protocol.overhead for _, protocol in choice) + (0.0 if started else launch)
        copying = max(
            (a.own(group) / p.copy_bandwidth for a, p in choice if p.copy_bandwidth), default=0.0
        )
        name = " + ".join(dict.fromkeys(f"{a.name} ({p.name})" for a, p in choice))
        options.append(Way(name=name, line=(overhead + alpha, beta + copying)))
    return options
