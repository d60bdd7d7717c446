"""What random numbers are drawn from while a stage runs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Draws:
    """`exact`: torch's own generator."""

    seed: int = 0
    step: int = 0
    exact: bool = True


class _Current(threading.local):
    draws: Draws | None = None


_CURRENT = _Current()


@contextmanager
def drawing(draws: Draws) -> Iterator[None]:
    """Operators inside draw from `draws`."""
    before, _CURRENT.draws = _CURRENT.draws, draws
    try:
        yield
    finally:
        _CURRENT.draws = before
