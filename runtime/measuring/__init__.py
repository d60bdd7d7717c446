"""Measurements of the present ranks: collectives, matrix products, memory and launches."""

from .collective_times import KINDS, GroupPlace, byte_sizes, places
from .device_times import DeviceTimes
from .measurement import Measurements, Wanted, measure, measure_on_rank, ranks_at_hand

__all__ = [
    "KINDS",
    "DeviceTimes",
    "GroupPlace",
    "Measurements",
    "Wanted",
    "byte_sizes",
    "measure",
    "measure_on_rank",
    "places",
    "ranks_at_hand",
]
