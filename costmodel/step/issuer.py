"""`Issuer`: the collectives of a step, each on the stream of its group.

Each begins behind the computation issued so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.sharding.mesh import Axes
from autopar.sharding.program import Collective

from .mesh_prices import MeshPrices
from .reasons import Reason
from .streams import Sent, Streams

PARAMETERS = " (parameters)"
"""The end of the name of a stream that parameters have."""


def axes_of_stream(stream: str) -> str:
    """Return the names of the axes over which a stream communicates."""
    return stream.removesuffix(PARAMETERS)


class Issuer:
    """Issues collectives at their prices on `streams`.

    A process group has a stream of its own. `reason`: why computation waits for them. `apart`: the
    axes over which parameters have another group than values, if these are collectives of
    parameters.
    """

    def __init__(
        self,
        prices: MeshPrices,
        streams: Streams,
        reason: Reason,
        apart: frozenset[Axes] = frozenset(),
    ) -> None:
        self.prices = prices
        self.streams = streams
        self.reason = reason
        self.apart = apart
        self.known: dict[tuple[str, Axes, int], float] = {}

    def issue(self, kind: str, axes: Axes, nbytes: int, name: str) -> Sent:
        """Start a collective behind the computation so far."""
        # A wait is told by what was waited for, wherever it happens.
        seconds = self._seconds(kind, axes, nbytes)
        return self.streams.send(name, kind, self.stream(axes), seconds, self.reason)

    def _seconds(self, kind: str, axes: Axes, nbytes: int) -> float:
        key = (kind, axes, nbytes)
        if key not in self.known:
            rate = self.prices.cluster.framework.habits.gather_rate
            least = 0.0 if kind == "all_reduce" else nbytes / rate
            self.known[key] = max(self.prices.seconds(*key), least)
        return self.known[key]

    def for_seconds(self, collective: Collective, seconds: float) -> Sent:
        """Start a part of a program's collective, of so many seconds."""
        stream = self.stream(collective.axes)
        return self.streams.send(collective.tensor, collective.kind, stream, seconds, self.reason)

    def stream(self, axes: Axes) -> str:
        """Return the stream of the group over `axes`."""
        return self.prices.mesh.name(axes) + PARAMETERS * (axes in self.apart)

    def started(self, collective: Collective) -> Sent:
        """Start a program's collective behind the computation so far."""
        return self.for_seconds(collective, self.prices.collective(collective))

    def blocking(self, collectives: Sequence[Collective]) -> None:
        """Start collectives one after the other; computation waits for each."""
        for collective in collectives:
            self.streams.wait(self.started(collective))
