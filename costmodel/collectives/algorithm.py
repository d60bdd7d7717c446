"""`Algorithm`: the closed form of a way to run a collective, in steps and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def log2_up(n: int) -> int:
    """The rounds in which something that doubles reaches n."""
    return (n - 1).bit_length()


def share(n: int) -> float:
    """The share of the bytes that leaves a device: all but one of n parts."""
    return (n - 1) / n


@dataclass(frozen=True, slots=True, kw_only=True)
class Algorithm:
    """The steps of a collective, and its bytes through the busiest port, in a group of n.

    The bytes are a multiple of the collective's. `layout`: how it is laid over levels
    (`algorithm_lines`). `own`: bytes that a device moves inside its own memory, as a multiple of
    the collective's. `inner_steps`: steps inside the innermost branches, where they differ.
    `feature`: a feature that the level needs. `apart`: it runs only where no two members share a
    unit.
    """

    name: str
    layout: str
    steps: Callable[[int], float]
    traffic: Callable[[int], float]
    own: Callable[[int], float] = lambda n: 0.0
    inner_steps: Callable[[int], float] | None = None
    feature: str | None = None
    apart: bool = False
