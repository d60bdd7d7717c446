"""`Issuer`: the collectives of a step, each on the stream of its group.

Each begins behind the computation issued so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.sharding.mesh import Axes
from autopar.sharding.program import Collective

from .mesh_prices import MeshPrices
from .shared_links import Sent
from .streams import Clock

PARAMETERS = " (parameters)"
"""The end of the name of a stream that parameters have."""


def stream_of(prices: MeshPrices, axes: Axes, *, of_units: bool) -> str:
    """Return the stream of the group over `axes` that values have, or parameters in units."""
    return prices.mesh.name(axes) + PARAMETERS * of_units


def axes_of_stream(stream: str) -> str:
    """Return the names of the axes over which a stream communicates."""
    return stream.removesuffix(PARAMETERS)


class Issuer:
    """Issues collectives at their prices on `clock`.

    A process group has a stream of its own; `of_units`: those of parameters.
    """

    def __init__(self, prices: MeshPrices, clock: Clock, *, of_units: bool) -> None:
        self.prices = prices
        self.clock = clock
        self.of_units = of_units
        self.known: dict[tuple[str, Axes, int], float] = {}

    def issue(self, kind: str, axes: Axes, nbytes: int, name: str) -> Sent:
        """Start a collective behind the computation so far."""
        key = (kind, axes, nbytes)
        if key not in self.known:
            self.known[key] = self.prices.seconds(*key)
        stream = stream_of(self.prices, axes, of_units=self.of_units)
        return self.clock.send(name, kind, stream, self.known[key], self.clock.now)

    def started(self, collective: Collective) -> Sent:
        """Start a program's collective behind the computation so far."""
        return self.issue(collective.kind, collective.axes, collective.nbytes, collective.tensor)

    def blocking(self, collectives: Sequence[Collective]) -> None:
        """Start collectives one after the other; computation waits for each."""
        for collective in collectives:
            self.clock.wait(self.started(collective).end)
