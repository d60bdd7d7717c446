"""The multiplicities of a step's work under a schedule: how often its parts are done, and how long results are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Segments = tuple[tuple[str, ...], ...]
"""Groups of operators, by name, whose outputs are recomputed in the backward pass."""


FORBIDDEN = 1e9
"""A factor that makes any collective more expensive than all other costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The number of equal operators or tensors that one represents, by name (1 if it is not named).

    `handed`: from a value that the first layer hands on to that of the layer that represents all further layers.
    Readers of the first value also read the second one, once for each layer between.
    """

    operators: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, int] = field(default_factory=dict)
    handed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiplicities:
    """The multiplicities of a step.

    `passes`: how often the time of a micro-batch counts (micro-batches plus bubble). `in_flight`: micro-batches
    between their forward and backward pass at once. `accumulating`: gradients of several micro-batches are added up.
    `hidden`: the share of the parameters' collectives that runs under computation. `early`: from parameters to their
    first reader; on that way the first gather and the last reduction are not hidden (see `first_parameters.py`). `waits`:
    seconds that every collective of a value waits for earlier ones of parameters. `once`: the counted share of what is
    done once a step. `covers`: the share of the work of passes that does not count, where collectives of parameters take
    longer. `busy`: a link; the collectives of parameters on others count `beside` so often. `segments`: the recomputed
    operators. `zero`: parameters stored split and used gathered are gathered once a step, with gradients added
    up whole (1) or as shards after every micro-batch (2), or gathered for every pass (3); with 0 there are none.
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
        """How often the work of a micro-batch counts: without the passes under which parameters are sent."""
        return self.passes * (1 - self.covers) if self.zero >= 2 else self.passes - self.covers

    @property
    def gathers(self) -> tuple[float, float]:
        """How often a parameter that is stored split is gathered, and its gradient reduced."""
        once, passes = self.once, self.passes
        return {0: (once, once), 1: (once, once), 2: (once, passes), 3: (2.0 * passes, passes)}[self.zero]

    def is_early(self, parameter: str, reader: str | None) -> bool:
        """Whether nothing is hidden of a parameter's collectives, on the way from its storage (None) or on to a reader."""
        return parameter in self.early and reader in (None, self.early[parameter])

    def hidden_of(self, parameter: str, reader: str | None) -> float:
        """The hidden share of a parameter's collectives on such a way."""
        return 0.0 if self.is_early(parameter, reader) else self.hidden

    def of_parameters(self, hidden: float) -> tuple[float, float]:
        """How often the collectives of a parameter's value and gradient count, once a step without their `hidden` share.

        What is sent more than once is hidden like that of any other parameter. Without ZeRO no parameter may be gathered.
        """
        first, (ahead, back) = (1 - hidden) * self.once, self.gathers
        more_ahead, more_back = ((1 - self.hidden) * (often - self.once) for often in (ahead if self.zero else FORBIDDEN, back))
        return first + more_ahead, first + more_back

    def of_values(self, again: bool) -> tuple[float, float]:
        """How often the collectives of an activation's value and gradient count; `again`: its reader is recomputed."""
        return (2.0 if again else 1.0) * self.counted, self.counted
