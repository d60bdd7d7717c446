"""What a cluster is, and what communication and computation cost on it."""

from .cluster import Cluster, bind_axes, join, parse_span
from .cluster_file import dump, load_cluster, presets
from .collectives import KINDS, Algorithm, collective_time, linear, lines
from .device import Device
from .level import Level
from .local import default_cluster, local_gpus
from .pools import crossing, send_seconds

__all__ = [
    "KINDS", "Algorithm", "Cluster", "Device", "Level", "bind_axes", "collective_time", "crossing",
    "default_cluster", "dump", "join", "linear", "lines", "load_cluster", "local_gpus", "parse_span", "presets", "send_seconds",
]  # fmt: skip
