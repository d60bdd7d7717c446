"""From a plan's program to that of this rank: segments of local operators and collectives."""

from .lower import Arrival, Exchange, lower, lower_preamble, lower_scheduled, same_operators
from .program import LocalProgram, LocalSegment, Time, identifier

__all__ = [
    "Arrival",
    "Exchange",
    "LocalProgram",
    "LocalSegment",
    "Time",
    "identifier",
    "lower",
    "lower_preamble",
    "lower_scheduled",
    "same_operators",
]
