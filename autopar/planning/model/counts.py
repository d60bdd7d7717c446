"""The number of equal operators and tensors that each one of a folded graph stands for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Segments = tuple[tuple[str, ...], ...]
"""Groups of operators, by name, whose outputs are recomputed in the backward pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The number of equal operators or tensors that one represents, by name (1 if it is not named).

    `handed`: from a value that the first layer hands on to that of the layer that represents all
    further layers. Readers of the first value also read the second one, once for each layer
    between.
    """

    operators: Mapping[str, int] = field(default_factory=dict)
    tensors: Mapping[str, int] = field(default_factory=dict)
    handed: Mapping[str, str] = field(default_factory=dict)
