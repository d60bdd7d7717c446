"""Figures of a search that depend on their keys alone, so that searches before it may know them.

What is not in a key are the orders of elimination that graphs share. So a figure comes with those
on which it rests, and is taken where the same orders hold here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, cast

from autopar.search import Rest, resting, sharing

T = TypeVar("T")


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
            if self.before is None or kind is None:
                return None
            told = self.before.recalled(key, kind)
            if told is None:
                return None
            self._own[key] = Own(figure=told[0], kind=kind, rest=told[1])
        own = self._own[key]
        if shared is not None:
            shared.use(own.rest)
        return (own.figure,)

    def note(self, key: object, figure: object, rest: Rest, kind: Any = None) -> None:
        """Note a figure, and what it rests on."""
        self._own[key] = Own(figure=figure, kind=kind, rest=rest)

    def remember(self) -> None:
        """Hand the figures that are known by now on to searches to come."""
        if self.before is not None:
            self.before.learn((key, own) for key, own in self._own.items() if own.kind is not None)
