"""Clusters, and the cost of communication and computation on them."""

from .cluster.axis_binding import bind_axes, parse_span
from .cluster.cluster import Cluster, join
from .cluster.level import Level
from .cluster.local_gpus import default_cluster, local_gpus
from .cluster.reading import load_cluster, presets
from .cluster.stage_messages import crossing, send_seconds
from .cluster.writing import dump
from .collectives import KINDS, Algorithm, collective_time, linear, lines
from .device import Device

__all__ = [
    "KINDS",
    "Algorithm",
    "Cluster",
    "Device",
    "Level",
    "bind_axes",
    "collective_time",
    "crossing",
    "default_cluster",
    "dump",
    "join",
    "linear",
    "lines",
    "load_cluster",
    "local_gpus",
    "parse_span",
    "presets",
    "send_seconds",
]
