"""Clusters, and the cost of communication and computation on them."""

from .cluster.file import dump, load_cluster, presets
from .cluster.level import Level
from .cluster.local import default_cluster, local_gpus
from .cluster.model import Cluster, bind_axes, join, parse_span
from .cluster.stage_messages import crossing, send_seconds
from .collectives import KINDS, Algorithm, collective_time, linear, lines
from .device import Device

__all__ = [
    "KINDS", "Algorithm", "Cluster", "Device", "Level", "bind_axes", "collective_time", "crossing",
    "default_cluster", "dump", "join", "linear", "lines", "load_cluster", "local_gpus", "parse_span", "presets", "send_seconds",
]  # fmt: skip
