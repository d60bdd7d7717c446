"""The order of programs: by seconds, and of equally fast ones the simpler first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar


class Ranked(Protocol):
    """A program with its seconds, and a rank, which begins with them."""

    @property
    def seconds(self) -> float:
        """Seconds of a step."""

    @property
    def rank(self) -> tuple[float, int, int]:
        """Seconds, then the figures that decide between equally fast programs."""


R = TypeVar("R", bound=Ranked)


def first_of(programs: Sequence[R]) -> R:
    """The first by rank; ranks are computed only where seconds are equal."""
    least = min(program.seconds for program in programs)
    fastest = [program for program in programs if program.seconds == least]
    return fastest[0] if len(fastest) == 1 else min(fastest, key=lambda program: program.rank)
