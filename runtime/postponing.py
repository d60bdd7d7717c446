"""Gradients of weights that are made later than those of inputs, so that other stages need not wait for them (zero-bubble pipelines).

A matrix product with a parameter leaves its weight's gradient undone while `postponed` is on: the two factors are kept instead, and
multiplied when the weights' turn comes. All other gradients are made at once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from .lowering.program import Place

Late = tuple[Place, Callable[[], Tensor]]


class _Present(threading.local):
    late: list[Late] | None = None


_PRESENT = _Present()


@contextmanager
def postponed(late: list[Late] | None) -> Iterator[None]:
    """Backward passes inside put what they leave undone into `late`, if there is such a list."""
    before, _PRESENT.late = _PRESENT.late, late
    try:
        yield
    finally:
        _PRESENT.late = before
