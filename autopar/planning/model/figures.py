"""Figures of a search that depend on their keys alone, so that others may work them out.

Others are processes that work ahead of the search, and searches of the same model before it. What
is not in a key are the orders of elimination that graphs share. So others tell on which of them a
figure rests, and the figure is taken where the same orders hold here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from autopar.search import Rest, resting, sharing

T = TypeVar("T")
Entry = tuple[object, Any, Rest]
"""A key, the figure under it, and what it rests on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A figure that is known here, its type (None: it is of one search only), and its rest."""

    figure: Any
    kind: Any
    rest: Rest


class Before(Protocol):
    """The figures of searches before this one."""

    def recalled(self, key: object, kind: Any) -> tuple[Any, Rest] | None:
        """The figure of a key, of a type, with the shared orders on which it rests here."""

    def learn(self, figures: Iterable[tuple[object, Own]]) -> None:
        """Take over the figures of this search, each with its key."""


class Figures:
    """Figures by keys of all that they depend on, each worked out once.

    Keys and figures are small values, equal in every process. `before`: those of searches before.
    """

    def __init__(self, before: Before | None = None) -> None:
        self.before = before
        self._own: dict[object, Own] = {}
        self._told: dict[object, tuple[Any, Rest]] = {}
        # In a process that works for another one: which figures are new to that one.
        self._fresh: list[object] | None = None

    def once(self, key: object, make: Callable[[], T], kind: Any = None) -> T:
        """Return the figure of a key; `make` works it out where that was not done yet.

        `kind`: its type, where searches to come may know it, too.
        """
        if (known := self.known(key, kind)) is not None:
            return cast(T, known[0])
        with resting() as rest:
            figure = make()
        self.note(key, figure, rest, kind)
        return figure

    def once_below(
        self,
        key: tuple[object, ...],
        enough: float,
        make: Callable[[], T],
        bound: Callable[[T], float],
        kind: Any,
    ) -> T:
        """Return the figure of a key, for which no more than a bound of `enough` is proven.

        A figure whose `bound` stays below that is the same for whatever is enough above it.
        """
        known = self.known(key, kind)
        if known is not None and bound(known[0]) < enough:
            return cast(T, known[0])
        with_enough = (*key, enough)
        if (known := self.known(with_enough, kind)) is not None:
            return cast(T, known[0])
        with resting() as rest:
            figure = make()
        self.note(key if bound(figure) < enough else with_enough, figure, rest, kind)
        return figure

    def known(self, key: object, kind: Any = None) -> tuple[Any] | None:
        """The figure of a key, in a tuple of its own; None where it was not worked out yet."""
        shared = sharing()
        if key not in self._own:
            told = self._told.pop(key, None)
            # Where another order holds by now, the same figure may come out otherwise here.
            if told is not None and shared is not None and not shared.holds(told[1]):
                told = None
            if told is None and self.before is not None and kind is not None:
                told = self.before.recalled(key, kind)
            if told is None:
                return None
            self.note(key, *told, kind, fresh=False)
        own = self._own[key]
        if shared is not None:
            shared.use(own.rest)
        return (own.figure,)

    def note(
        self, key: object, figure: object, rest: Rest, kind: Any = None, *, fresh: bool = True
    ) -> None:
        """Note a figure that was worked out here (`fresh`), and what it rests on."""
        self._own[key] = Own(figure=figure, kind=kind, rest=rest)
        if fresh and self._fresh is not None:
            self._fresh.append(key)

    def remember(self) -> None:
        """Hand the figures that are known by now on to searches to come."""
        if self.before is not None:
            self.before.learn((key, own) for key, own in self._own.items() if own.kind is not None)

    # --- Between processes. ---

    def begin_telling(self) -> None:
        """Note from now on, in a process that works for another one, what is new to that one."""
        self._fresh = []

    def tell(self) -> list[Entry]:
        """The figures noted since the last call that rest on shared orders alone."""
        fresh = self._fresh or []
        known = ((key, self._own[key]) for key in fresh)
        entries = [(key, own.figure, own.rest) for key, own in known if own.rest.alone]
        fresh.clear()
        return entries

    def take(self, entries: Iterable[Entry]) -> None:
        """Take over figures that another process worked out."""
        self._told.update((key, (figure, rest)) for key, figure, rest in entries)

    def take_no_more(self) -> None:
        """Forget what others worked out and nobody asked for."""
        self._told.clear()
