"""`Protocol`: a way to send messages over a level, of low latency or of high bandwidth."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import ClusterError, unknown

KINDS = (
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "send",
    "barrier",
)
"""The collectives that have a price."""
ALGORITHMS = ("ring", "tree", "in-switch", "pat", "peer to peer", "message")
"""The algorithms of a backend that may run in a protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """Figures of the `algorithms` that run in it.

    `overhead`: seconds of a collective, with its launch. `latency`: seconds of a step.
    `efficiency`: the reached share of the bandwidth. `collectives`: those for which the figures
    hold (empty: all that no other protocol of the level names). `copy_bandwidth`: B/s at which a
    device moves its own part inside its memory (None: at no cost).
    """

    name: str
    algorithms: tuple[str, ...]
    overhead: float
    latency: float
    efficiency: float
    collectives: tuple[str, ...] = ()
    copy_bandwidth: float | None = None

    def __post_init__(self) -> None:
        where = f"protocol {self.name!r}"
        for what, given, valid in (
            ("algorithm", self.algorithms, ALGORITHMS),
            ("collective", self.collectives, KINDS),
        ):
            for name in given:
                if name not in valid:
                    raise ClusterError(f"{where}: " + unknown(what, name, valid))
        if not self.algorithms:
            raise ClusterError(
                f"{where}: no algorithm runs in it; name some of {', '.join(ALGORITHMS)}"
            )
        figures: Mapping[str, float] = {"overhead": self.overhead, "latency": self.latency}
        for name, value in figures.items():
            if not 0 <= value < math.inf:
                raise ClusterError(
                    f"{where}: {name} is {value}; it must be finite and not negative"
                )
        if not 0 < self.efficiency <= 1:
            raise ClusterError(
                f"{where}: efficiency is {self.efficiency}; it must be above 0 and at most 1"
            )
        if self.copy_bandwidth is not None and not 0 < self.copy_bandwidth < math.inf:
            raise ClusterError(
                f"{where}: copy_bandwidth is {self.copy_bandwidth}; it must be finite and above 0"
            )

    @property
    def key(self) -> str:
        """The protocol's identity on its level: its name, and the first of its collectives."""
        return ".".join((self.name, *self.collectives[:1]))

    @property
    def partner(self) -> str:
        """The protocol of the same collective on other levels: a switch works with Simple."""
        return "simple" if "in-switch" in self.algorithms else self.name
