"""Every number of `Effort` with a weaker setting, and plans made with other numbers.

Where a number has a setting that switches its part of the search off, that is the weaker one.
Limits of work that is needed are a fraction of theirs, and tolerances a multiple.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

# The planner is imported whole, so that every module with the numbers is there to be patched.
import autopar.planning.planner  # noqa: F401
from autopar.planning.model.effort import EFFORT, Effort

ROOM = "autopar.planning."
NAME = "EFFORT"
NEVER = 100.0
"""A multiple or a gap that is not reached."""

WEAKER: Mapping[str, Any] = {
    # The outer search.
    "close": 1e-2,
    "margin": 0.0,
    "plain_axes": 1,
    "split": 1,
    "finer": 0,
    "filled": 1,
    # The certificate.
    "certified": NEVER,
    "proven": 48,
    "within": 0,
    "slack": 0.45,
    # A candidate.
    "bounded": 2e-2,
    "remembered": 0,
    "exposed": NEVER,
    "shares": (),
    # Where memory binds.
    "fittings": 1,
    "full": 0.5,
    "plenty": 1.0,
    "behind": 1.0,
    # The programs of the whole graph.
    "likely": 1.0,
    "tried": 1,
}


class Watched:
    """The numbers as they are, with the names of those that were read."""

    def __init__(self, effort: Effort) -> None:
        self._effort = effort
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._effort, name)
        self.read.add(name)
        return value


@contextlib.contextmanager
def patched(effort: Effort | Watched) -> Iterator[None]:
    """Plan with other numbers, in every module that has them by name."""
    _swap(EFFORT, effort)
    try:
        yield
    finally:
        # Modules that were first imported meanwhile have the other numbers, too.
        _swap(effort, EFFORT)


def _swap(old: object, new: object) -> None:
    """Give every loaded module of planning with `old` the numbers `new`."""
    for name, module in list(sys.modules.items()):
        if name.startswith(ROOM) and vars(module).get(NAME) is old:
            vars(module)[NAME] = new
