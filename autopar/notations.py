"""Layouts in the notations of other systems.

`autopar.integrations.notations` holds the converters.
"""

from __future__ import annotations

from .integrations.notations import NOTATIONS, Notation, read_layout, write_layout

__all__ = ["NOTATIONS", "Notation", "read_layout", "write_layout"]
