"""How often the parts of a step's work are done, and how long what they leave is kept: what a schedule makes of the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Segments = tuple[tuple[str, ...], ...]
"""Groups of operators, by name, whose outputs are made again in the backward pass."""


FORBIDDEN = 1e9
"""A multiple that makes any collective dearer than all else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """For how many equal ones an operator or a tensor stands, by name (for itself alone, where it is not named).

    `handed`: a value that a layer hands on to the next, and the value of the layer that stands for all layers but the first: what
    reads the one reads the other as often as there are layers between.
    """

    operators: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, int] = field(default_factory=dict)
    handed: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The multiplicities of a step.

    `passes`: how often the time of a micro-batch counts (the micro-batches, and the bubble). `in_flight`: micro-batches between their
    forward and their backward pass at once. `hidden`: share of the collectives of parameters that runs under computation, but for those of
    `early` ones on their way to their first reader (see `early.py`), to which these are mapped. `waits`: seconds that every collective of a
    value waits for those of parameters before it. `once`: how much of what is done once a step counts, of a micro-batch's work all does.
    `segments`: what is recomputed. `zero`: parameters stored split and used gathered are
    gathered once a step, their gradients added up whole (1) or as shards after every micro-batch (2), or gathered for every pass (3); 0:
    none are.
    """

    counts: Counts = field(default_factory=Counts)
    passes: float = 1.0
    in_flight: float = 1.0
    accumulating: bool = False
    hidden: float = 0.0
    early: Mapping[str, str] = field(default_factory=dict)
    waits: float = 0.0
    once: float = 1.0
    segments: Segments = ()
    zero: int = 1

    @property
    def gathers(self) -> tuple[float, float]:
        """How often a parameter that is stored split is gathered, and its gradient reduced."""
        once, passes = self.once, self.passes
        return {0: (once, once), 1: (once, once), 2: (once, passes), 3: (2.0 * passes, passes)}[self.zero]

    def hidden_of(self, parameter: str, reader: str | None) -> float:
        """The share of the collectives of a parameter that is hidden on the way from its storage (None), or on to a reader."""
        return 0.0 if parameter in self.early and reader in (None, self.early[parameter]) else self.hidden

    def of_parameters(self, hidden: float) -> tuple[float, float]:
        """How often the collectives of that count, on the way to the value and to its gradient, of which the share `hidden` counts nothing;
        none are issued where none may be."""
        ahead, back = self.gathers
        return (1 - hidden) * (ahead if self.zero else FORBIDDEN), (1 - hidden) * back

    def of_values(self, again: bool) -> tuple[float, float]:
        """The same of an activation, `again` where its reader is recomputed."""
        return (2.0 if again else 1.0) * self.passes, self.passes
