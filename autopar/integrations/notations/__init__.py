"""Layouts in the notations of other systems.

Converters lead both ways, over the one `Layout` of `autopar.sharding`.
"""

from .table import NOTATIONS, Notation, read_layout, write_layout

__all__ = ["NOTATIONS", "Notation", "read_layout", "write_layout"]
