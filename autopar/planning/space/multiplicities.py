"""The multiplicities of a step's work: how often its parts are done, and how long results stay."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from autopar.planning.model.counts import Counts, Segments

# Not infinite, because infinity times a share or a price of 0 is not a number.
FORBIDDEN = 1e9
"""A factor that makes any collective more expensive than all other costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplicities:
    """The multiplicities of a step.

    - `passes`: how often the time of a micro-batch counts (micro-batches plus bubble).
    - `in_flight`: micro-batches between their forward and backward pass at once.
    - `accumulating`: gradients of several micro-batches are added up.
    - `hidden`: the share of the parameters' collectives that runs under computation.
    - `early`: from parameters to their first reader. On that way the first gather and the last
      reduction are not hidden (see `first_read.py`).
    - `waits`: seconds that every collective of a value waits for earlier ones of parameters.
    - `once`: the counted share of what is done once a step.
    - `covers`: the share of the work of passes that does not count, where collectives of parameters
      take longer.
    - `busy`: a link. The collectives of parameters on other links count `beside` so often.
    - `segments`: the recomputed operators.
    - `zero`: the ZeRO stage. With 0 no parameter that is stored split is used gathered. With 1 and
      2 such parameters are gathered once a step; gradients are added up whole (1), or as shards
      after every micro-batch (2). With 3 they are gathered for every pass.
    """

    counts: Counts = field(default_factory=Counts)
    passes: float = 1.0
    in_flight: float = 1.0
    accumulating: bool = False
    hidden: float = 0.0
    early: Mapping[str, str] = field(default_factory=dict)
    waits: float = 0.0
    once: float = 1.0
    covers: float = 0.0
    busy: str = ""
    beside: float = 1.0
    segments: Segments = ()
    zero: int = 1

    @property
    def counted(self) -> float:
        """Number of times that the work of a micro-batch counts.

        Passes under which parameters are sent do not count.
        """
        # ZeRO 2 and 3 send in every pass, the others in one pass of a step.
        return self.passes * (1 - self.covers) if self.zero >= 2 else self.passes - self.covers

    @property
    def gathers(self) -> tuple[float, float]:
        """Numbers of times that a split parameter is gathered, and its gradient reduced."""
        once = self.once
        passes = self.passes
        # ZeRO 3 gathers for the forward pass, and again for the backward pass.
        return {0: (once, once), 1: (once, once), 2: (once, passes), 3: (2.0 * passes, passes)}[
            self.zero
        ]

    def is_early(self, parameter: str, readers: Collection[str] | None) -> bool:
        """Whether nothing is hidden of a parameter's collectives on one of its ways.

        `readers`: None for the way from its storage, else the operators at the way's end.
        """
        return parameter in self.early and (readers is None or self.early[parameter] in readers)

    def hidden_of(self, parameter: str, readers: Collection[str] | None) -> float:
        """The hidden share of a parameter's collectives on such a way."""
        return 0.0 if self.is_early(parameter, readers) else self.hidden

    def of_parameters(self, hidden: float) -> tuple[float, float]:
        """Return how often the collectives of a parameter's value and of its gradient count.

        What is done once a step counts without its `hidden` share.

        What is sent more than once is hidden like that of any other parameter. Without ZeRO no
        parameter may be gathered.
        """
        first = (1 - hidden) * self.once
        ahead, back = self.gathers
        more_ahead, more_back = (
            (1 - self.hidden) * (often - self.once)
            for often in (ahead if self.zero else FORBIDDEN, back)
        )
        return first + more_ahead, first + more_back
