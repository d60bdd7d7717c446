"""`Protocol`: how a library sends the messages of a collective over a level, quick to start or quick for bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import ClusterError, unknown

ALGORITHMS = ("ring", "tree", "in-switch", "peer to peer", "message")
"""The algorithms of a backend that may run in a protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """For the `algorithms` that run in it: seconds of a collective (`overhead`, with its launch), of a step, part of the bandwidth."""

    name: str
    algorithms: tuple[str, ...]
    overhead: float
    latency: float
    efficiency: float

    def __post_init__(self) -> None:
        where = f"protocol {self.name!r}"
        for algorithm in self.algorithms:
            if algorithm not in ALGORITHMS:
                raise ClusterError(f"{where}: " + unknown("algorithm", algorithm, ALGORITHMS))
        if not self.algorithms:
            raise ClusterError(f"{where}: no algorithm runs in it; name some of {', '.join(ALGORITHMS)}")
        figures: Mapping[str, float] = {"overhead": self.overhead, "latency": self.latency}
        for name, value in figures.items():
            if not 0 <= value < math.inf:
                raise ClusterError(f"{where}: {name} is {value}; it must be finite and not negative")
        if not 0 < self.efficiency <= 1:
            raise ClusterError(f"{where}: efficiency is {self.efficiency}; it must be above 0 and at most 1")
