"""Measurements of the present ranks: collectives, matrix products, memory and launches."""

from .collectives import KINDS, GroupPlace, byte_sizes, places
from .device import DeviceTimes
from .run import Measurements, Wanted, measure, measure_on_rank

__all__ = ["KINDS", "DeviceTimes", "GroupPlace", "Measurements", "Wanted", "byte_sizes", "measure", "measure_on_rank", "places"]
