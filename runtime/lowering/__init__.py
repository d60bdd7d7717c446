"""Lowering: a plan's program becomes the local program of this rank, segments of local operators and collectives."""

from .build import Arrival, lower, lower_preamble, lower_scheduled, same_operators
from .program import LocalProgram, LocalSegment, Time, identifier

__all__ = [
    "Arrival", "LocalProgram", "LocalSegment", "Time", "identifier", "lower", "lower_preamble", "lower_scheduled", "same_operators",
]  # fmt: skip
