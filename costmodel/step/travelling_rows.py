"""The exchanges of a layer of experts beside which other operators run, on the streams of a step.

    leaves    the counts of rows, then the rows set off
    works     when they have come: further exchanges inside nodes, the experts; the results set off
    arrives   the results have come

Backward the gradients of the results set off where the results arrived, and those of the rows come
home where the rows left.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from autopar.order.scheduled import set_off
from autopar.sharding.program import Collective

from .issuer import Issuer
from .streams import NOTHING, Sent


class Exchanges:
    """The exchanges of one layer: `ahead` and `back` are its collectives in order of issue."""

    def __init__(
        self, issuer: Issuer, ahead: Sequence[Collective], back: Sequence[Collective]
    ) -> None:
        self.issuer = issuer
        self.ahead = ahead
        self.back = back
        self.coming: Sent = NOTHING
        # Of every exchange that goes out, one comes home; the last is that of the outermost axis.
        self.hops = sum(c.kind == "all_to_all" for c in ahead) // 2
        self.off = set_off(ahead)

    def leave(self) -> None:
        """Let the rows set off."""
        self.issuer.blocking(self.ahead[: self.off - 1])
        self.coming = self.issuer.started(self.ahead[self.off - 1])

    def work(self, compute: Callable[[], None]) -> None:
        """Compute on the rows, and let the results set off."""
        self.arrive()
        self.issuer.blocking(self.ahead[self.off : -1])
        compute()
        self.coming = self.issuer.started(self.ahead[-1])

    def arrive(self) -> None:
        """Wait for what is under way."""
        self.issuer.streams.wait(self.coming)
        self.coming = NOTHING

    def leave_back(self) -> None:
        """Let the gradients of the results set off; a layer without gradients has none."""
        if self.back:
            self.coming = self.issuer.started(self.back[0])

    def work_back(self, compute: Callable[[], None]) -> None:
        """Compute the gradients of the rows, which set off if they are wanted."""
        home = len(self.back) > self.hops
        self.arrive()
        self.issuer.blocking(self.back[1 : len(self.back) - home])
        compute()
        if home:
            self.coming = self.issuer.started(self.back[-1])
