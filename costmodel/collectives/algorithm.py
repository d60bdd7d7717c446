"""`Algorithm`: the closed form of a way to run a collective: its steps, and the bytes through the busiest port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def log2_up(n: int) -> int:
    """The rounds in which something that doubles reaches n."""
    return (n - 1).bit_length()


def share(n: int) -> float:
    """All but one of n parts."""
    return (n - 1) / n


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """Steps, and bytes through the busiest port as a multiple of the collective's bytes, in a group of n.

    `layout`: how it is laid over levels (`spans`). `own`: bytes that a device moves inside its own memory, as a
    multiple of the collective's. `inner_steps`: steps inside the innermost branches, where they differ. `feature`: a
    feature that the level needs. `apart`: it runs only where no two members share a unit.
    """

    name: str
    layout: str
    steps: Callable[[int], float]
    traffic: Callable[[int], float]
    own: Callable[[int], float] = lambda n: 0.0
    inner_steps: Callable[[int], float] | None = None
    feature: str | None = None
    apart: bool = False
