"""`Level`: links that join devices, or units of them, into one unit.

Times are in seconds, sizes in bytes, rates in bytes per second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopar.costmodel.device import check, check_fractions
from autopar.errors import ClusterError, unknown

from .protocols import ALGORITHMS, Protocol
from .residual import Residual
from .wiring import Wiring

FEATURES = ("in_switch", "pat", "rails")
"""Features of a level. `in_switch`: its switch adds up. `pat`: it runs PAT. `rails`: it joins only
devices of equal place in their units; other traffic first passes the level inside.
"""
ALONE = "device"


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """Links that join `size` children (devices, or units of the level inside) into one unit.

    `latency`: seconds per message. `bandwidth`: B/s one way of one port (the NVLink bundle of a
    device, a NIC); `efficiency`: the share of it that is reached. `shared_by`: the number of
    devices that use one port. `duplex`: a port sends and receives at full rate at once.
    `peer_bandwidth`: B/s one way to one peer, where devices are joined pair by pair (None: any part
    of `bandwidth` reaches any peer). `features`: of `FEATURES`. `protocols`: how the backend sends
    over it; an algorithm without a protocol runs at `latency` and `efficiency`. `slots`: places for
    children in a unit, where fewer are in use (0: all are in use). `oversubscription`: ratio of all
    ports' bandwidth to the level's. `wiring`: how its children are joined without a switch.
    `residuals`: errors of the fit of its protocols, by `residual.left_by`.
    """

    name: str
    size: int
    latency: float
    bandwidth: float
    efficiency: float = 1.0
    shared_by: int = 1
    duplex: bool = True
    peer_bandwidth: float | None = None
    features: tuple[str, ...] = ()
    protocols: tuple[Protocol, ...] = field(default=(), hash=False)
    slots: int = 0
    oversubscription: float = 1.0
    wiring: Wiring | None = None
    residuals: Mapping[str, Residual] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        where = f"level {self.name!r}"
        if not self.name.isidentifier() or self.name == ALONE:
            raise ClusterError(
                f"{where}: the name of a level is one word of letters, digits and _, other than "
                f"{ALONE!r}"
            )
        if self.size < 1 or self.shared_by < 1:
            raise ClusterError(
                f"{where}: size ({self.size}) and shared_by ({self.shared_by}) must be at least 1"
            )
        if self.slots and self.slots <= self.size:
            raise ClusterError(
                f"{where}: of {self.slots} slots {self.size} cannot be in use: give slots only "
                "where some are free"
            )
        given = {} if self.peer_bandwidth is None else {"peer_bandwidth": self.peer_bandwidth}
        check(where, above={"bandwidth": self.bandwidth, **given}, least={"latency": self.latency})
        check_fractions(where, efficiency=self.efficiency)
        if not 1 <= self.oversubscription < math.inf:
            raise ClusterError(
                f"{where}: oversubscription is {self.oversubscription}; at least 1, for all that "
                "its ports carry"
            )
        for feature in self.features:
            if feature not in FEATURES:
                raise ClusterError(f"{where}: " + unknown("feature", feature, FEATURES))

    @property
    def plain(self) -> Protocol:
        """The protocol that the level's own latency and efficiency make."""
        return Protocol(
            name="plain",
            algorithms=ALGORITHMS,
            overhead=0.0,
            latency=self.latency,
            efficiency=self.efficiency,
        )

    def protocols_for(self, kind: str, algorithm: str) -> tuple[Protocol, ...]:
        """Return the protocols in which an algorithm may run.

        They are those with figures for this collective, else those for all.
        """
        able = [protocol for protocol in self.protocols if algorithm in protocol.algorithms]
        own = tuple(protocol for protocol in able if kind in protocol.collectives)
        return (
            own or tuple(protocol for protocol in able if not protocol.collectives) or (self.plain,)
        )

    def rate(
        self, group: int, efficiency: float | None = None, *, exchanging: bool = False
    ) -> float:
        """B/s one way that one device reaches in a group of `group`, with the port to itself.

        `exchanging`: each device sends different bytes to each other one (all-to-all), for which
        some wirings are slower.
        """
        bandwidth = self.bandwidth
        if self.peer_bandwidth is not None:
            # The links to devices outside the group lie idle.
            bandwidth = min(bandwidth, self.peer_bandwidth * max(group - 1, 1))
        if self.wiring is not None:
            reach = self.wiring.reach(group)
            bandwidth *= reach.exchanging if exchanging else reach.telling
        # Over a half-duplex port sending and receiving take turns.
        shared = (1.0 if self.duplex else 0.5) / self.oversubscription
        return bandwidth * (self.efficiency if efficiency is None else efficiency) * shared
