"""Frameworks that train: what they do, on which seconds and bytes of a step depend."""

from .changes import Changed, changed, changes_of
from .framework import AUTOPAR, OWN, Framework
from .habits import LOSSES, Habits
from .kernels import DISPATCHERS, Kernels
from .table import FRAMEWORKS, LATEST, framework_named
from .targets import VERSIONS, framework_of, target_named

__all__ = [
    "AUTOPAR",
    "DISPATCHERS",
    "FRAMEWORKS",
    "LATEST",
    "LOSSES",
    "OWN",
    "VERSIONS",
    "Changed",
    "Framework",
    "Habits",
    "Kernels",
    "changed",
    "changes_of",
    "framework_named",
    "framework_of",
    "target_named",
]
