"""Cases that do not fit the memory, and what they need."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode


@dataclass(frozen=True, slots=True, kw_only=True)
class Misfit:
    """A case that does not fit the memory, and the least bytes that it needs on a device.

    `bounded`: the bytes are a bound from below, which no solution shows to do.
    """

    candidate: Candidate
    mode: Mode
    needed: float
    bounded: bool = False
