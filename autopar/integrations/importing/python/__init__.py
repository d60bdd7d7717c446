"""Python files of configurations, parsed and never run."""

from __future__ import annotations

from .configured import Configured, configured
from .files import parsed
from .values import Record, Unread, Value, is_plain, named_unread

__all__ = [
    "Configured",
    "Record",
    "Unread",
    "Value",
    "configured",
    "is_plain",
    "named_unread",
    "parsed",
]
