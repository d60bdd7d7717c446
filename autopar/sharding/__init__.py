"""Meshes, layouts, sharding rules, strategies and redistributions."""

from .layout import (
    B,
    Kind,
    Layout,
    P,
    Placement,
    R,
    S,
    format_layout,
    is_valid,
    local_shape,
    parse_layout,
    replicated,
)
from .mesh import Axis, Mesh, factorisations

__all__ = [
    "Axis",
    "B",
    "Kind",
    "Layout",
    "Mesh",
    "P",
    "Placement",
    "R",
    "S",
    "factorisations",
    "format_layout",
    "is_valid",
    "local_shape",
    "parse_layout",
    "replicated",
]
