"""Shell scripts as the commands that they start, by the values that the scripts themselves set."""

from __future__ import annotations

from .script import Script, Started
from .variables import is_known

__all__ = ["Script", "Started", "is_known"]
