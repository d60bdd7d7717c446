"""What a cluster is, and what communication and computation cost on it."""

from .cluster import Cluster, Device, Level, bind_axes, parse_span
from .cluster_file import dump, load_cluster, presets
from .collectives import KINDS, collective_time, linear, lines
from .compute import contraction_fraction
from .layouts import Algorithm
from .local import default_cluster, local_gpus

__all__ = [
    "KINDS", "Algorithm", "Cluster", "Device", "Level", "bind_axes", "collective_time", "contraction_fraction", "default_cluster", "dump",
    "linear", "lines", "load_cluster", "local_gpus", "parse_span", "presets",
]  # fmt: skip
