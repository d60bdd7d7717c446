"""The callback by which planning says what it is doing."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int, str], None]
"""Called with the number of steps done, the number of all, and the present step in words."""
