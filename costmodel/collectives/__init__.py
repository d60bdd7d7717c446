"""The cost of communication: each backend's algorithms in closed form, by protocol and level."""

from autopar.costmodel.cluster.protocols import KINDS

from .algorithm import Algorithm
from .times import collective_time, fastest_way, linear, lines, lower_envelope

__all__ = [
    "KINDS",
    "Algorithm",
    "collective_time",
    "fastest_way",
    "linear",
    "lines",
    "lower_envelope",
]
