"""`Issuer`: the collectives of a step, each on the stream of its group.

Each begins behind the computation issued so far.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.sharding.mesh import Axes
from autopar.sharding.program import Collective

from .mesh_prices import MeshPrices
from .shared_link import Sent
from .streams import Clock


class Issuer:
    """Issues collectives at their prices on `clock`.

    The process group of a mesh axis, or of several, has a stream of its own.
    """

    def __init__(self, prices: MeshPrices, clock: Clock) -> None:
        self.prices = prices
        self.clock = clock
        self.known: dict[tuple[str, Axes, int], float] = {}

    def issue(self, kind: str, axes: Axes, nbytes: int, name: str) -> Sent:
        """Start a collective behind the computation so far."""
        key = (kind, axes, nbytes)
        if key not in self.known:
            self.known[key] = self.prices.seconds(*key)
        return self.clock.send(
            name, kind, self.prices.mesh.name(axes), self.known[key], self.clock.now
        )

    def started(self, collective: Collective) -> Sent:
        """Start a program's collective behind the computation so far."""
        return self.issue(collective.kind, collective.axes, collective.nbytes, collective.tensor)

    def blocking(self, collectives: Sequence[Collective]) -> None:
        """Start collectives one after the other; computation waits for each."""
        for collective in collectives:
            self.clock.wait(self.started(collective).end)
