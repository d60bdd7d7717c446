"""Figures of a search that depend on their keys alone, so that other processes may work them out.

What is not in a key are the orders of elimination that graphs share. So another process tells on
which of them a figure rests, and the figure is taken where the same orders hold here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

from autopar.search import Rest, resting, sharing

T = TypeVar("T")
Entry = tuple[object, Any, Rest]
"""A key, the figure under it, and what it rests on."""


class Figures:
    """Figures by keys of all that they depend on, each worked out once.

    Keys and figures are small values, equal in every process.
    """

    def __init__(self) -> None:
        self._own: dict[object, Any] = {}
        self._told: dict[object, tuple[Any, Rest]] = {}
        # In a process that works for another one: what its own figures rest on, and which are new.
        self._rests: dict[object, Rest] | None = None
        self._fresh: list[object] = []

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return the figure of a key; `make` works it out where that was not done yet."""
        if (known := self.known(key)) is not None:
            return cast(T, known[0])
        with resting() as rest:
            figure = make()
        self.note(key, figure, rest)
        return figure

    def known(self, key: object) -> tuple[Any] | None:
        """The figure of a key, in a tuple of its own; None where it was not worked out yet."""
        shared = sharing()
        told = self._told.pop(key, None) if self._told and key not in self._own else None
        # Where another order holds by now, the same figure may come out otherwise here.
        if told is not None and (shared is None or shared.holds(told[1])):
            self._own[key] = told[0]
        if key not in self._own:
            return None
        if shared is not None and self._rests is not None and key in self._rests:
            shared.use(self._rests[key])
        return (self._own[key],)

    def note(self, key: object, figure: object, rest: Rest) -> None:
        """Note a figure that was worked out here, and what it rests on."""
        self._own[key] = figure
        if self._rests is not None:
            self._rests[key] = rest
            self._fresh.append(key)

    # --- Between processes. ---

    def begin_telling(self) -> None:
        """Note from now on, in a process that works for another one, what is new to that one."""
        self._rests = {}

    def tell(self) -> list[Entry]:
        """The figures noted since the last call that rest on shared orders alone."""
        rests = self._rests or {}
        entries = [(key, self._own[key], rests[key]) for key in self._fresh if rests[key].alone]
        self._fresh.clear()
        return entries

    def take(self, entries: Iterable[Entry]) -> None:
        """Take over figures that another process worked out."""
        self._told.update((key, (figure, rest)) for key, figure, rest in entries)

    def take_no_more(self) -> None:
        """Forget what others worked out and nobody asked for."""
        self._told.clear()
