"""The world of a plan on this process.

Plan and ranks come in; process groups, collectives and agreement go out.
"""

from .agreement import agree, digest
from .cuts import Cut, cuts_of, shard_of
from .device_groups import AxisGroup, DeviceGroups
from .process_groups import group_of
from .world import World

__all__ = [
    "AxisGroup",
    "Cut",
    "DeviceGroups",
    "World",
    "agree",
    "cuts_of",
    "digest",
    "group_of",
    "shard_of",
]
