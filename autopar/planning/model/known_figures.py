"""Figures that the searches of one model hand on to each other, in this process and in files.

A figure is taken where the orders of elimination on which it rests hold, too. So a search finds the
same plan whatever is known before it.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from autopar.ir.value_texts import value_text
from autopar.search import Rest, Sharing, sharing

from .figures import Figures, Own
from .request import Request

Basis = Mapping[str, str]
"""The digests of the orders on which a figure rests, by the digests of their keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """A figure of a type with its basis."""

    figure: Any
    kind: Any
    basis: Basis


class Files(Protocol):
    """Figures in files."""

    def read(self, about: str) -> Mapping[str, tuple[str, Basis]]:
        """The texts of the figures of some searches, by digests of their keys."""

    def figure_of(self, text: str, kind: Any) -> Any:
        """The figure of a text; `ValueError` if it is none of that type."""

    def write(self, about: str, known: Mapping[str, Known]) -> None:
        """Add figures of some searches."""


class KnownFigures:
    """The figures of all searches of a model; `files`: those of other processes."""

    def __init__(self, files: Files | None = None) -> None:
        self.files = files
        self._groups: dict[str, _Group] = {}
        self._begun: list[Figures] = []

    def of(self, request: Request, *, hiding: bool) -> Figures:
        """The figures for a search; those that are known of searches like it among them."""
        try:
            about = value_text((_in_common(request), hiding))
        # A user's function has no text.
        except ValueError:
            return Figures()
        if about not in self._groups:
            self._groups[about] = _Group(about, self.files)
        figures = Figures(self._groups[about])
        self._begun.append(figures)
        return figures

    def hand_on(self) -> None:
        """Hand on what the search that ends now has worked out."""
        # Each book of a search has figures of its own.
        for figures in self._begun:
            figures.remember()
        self._begun.clear()


def _in_common(request: Request) -> Request:
    """The request without what its figures do not depend on, or have in their keys."""
    request = replace(
        request, memory=None, gap=None, seconds=None, certified=True, fewer=True, mesh=None
    )
    # Passes of two micro-batches are merged only where both numbers are given.
    if request.overlap_experts:
        return request
    return replace(request, stages=None, micro_batches=None, recompute=None, zero=None)


class _Group:
    """The figures of requests that have what they depend on in common."""

    def __init__(self, about: str, files: Files | None) -> None:
        self.about = about
        self.files = files
        self._texts = {} if files is None else files.read(about)
        self._known: dict[str, Known] = {}
        self._orders: _Orders | None = None

    def recalled(self, key: object, kind: Any) -> tuple[Any, Rest] | None:
        """The figure of a key, of a type, with the shared orders on which it rests here."""
        orders = self._orders_here()
        mark = _mark(key)
        if orders is None or mark is None:
            return None
        if mark not in self._known and mark in self._texts and self.files is not None:
            text, basis = self._texts[mark]
            # A file that others have written there is not what is remembered.
            with contextlib.suppress(ValueError):
                figure = self.files.figure_of(text, kind)
                self._known[mark] = Known(figure=figure, kind=kind, basis=basis)
        known = self._known.get(mark)
        rest = None if known is None or known.kind != kind else orders.rest(known.basis)
        return None if known is None or rest is None else (known.figure, rest)

    def learn(self, figures: Iterable[tuple[object, Own]]) -> None:
        """Take over the figures of a search, each with its key."""
        orders = self._orders_here()
        if orders is None:
            return
        new = {}
        for key, own in figures:
            # What made an order, or followed the search's past, would come out otherwise elsewhere.
            if own.rest.alone and (mark := _mark(key)) is not None:
                known = Known(figure=own.figure, kind=own.kind, basis=orders.basis(own.rest))
                if self._known.get(mark) != known:
                    new[mark] = self._known[mark] = known
        # A search that worked out nothing new leaves the file as it is.
        if new and self.files is not None:
            self.files.write(self.about, new)

    def _orders_here(self) -> _Orders | None:
        shared = sharing()
        if shared is None:
            return None
        # Entries are counted anew in every search.
        if self._orders is None or self._orders.shared is not shared:
            self._orders = _Orders(shared)
        return self._orders


class _Orders:
    """The orders that graphs of a search share, as digests."""

    def __init__(self, shared: Sharing) -> None:
        self.shared = shared
        self._marks: list[str] = []
        self._places: dict[str, int] = {}
        self._values: dict[int, str] = {}

    def basis(self, rest: Rest) -> Basis:
        """The digests of what a figure rests on."""
        self._follow()
        return {self._marks[place]: self._value(place) for place in sorted(rest.entries)}

    def rest(self, basis: Basis) -> Rest | None:
        """The entries of a basis; None unless all of them hold here."""
        self._follow()
        places = set()
        for mark, value in basis.items():
            place = self._places.get(mark)
            if place is None or self._value(place) != value:
                return None
            places.add(place)
        return Rest(entries=places)

    def _follow(self) -> None:
        for place in range(len(self._marks), len(self.shared.log)):
            # A key without a text is never equal to one of another search.
            mark = _mark(self.shared.log[place][0]) or f"entry {place}"
            self._marks.append(mark)
            self._places[mark] = place

    def _value(self, place: int) -> str:
        # Orders are large, and few of them are ever asked for.
        if place not in self._values:
            self._values[place] = _mark(self.shared.log[place][1]) or f"value {place}"
        return self._values[place]


def _mark(value: object) -> str | None:
    """The digest of a value; None if it has no text."""
    try:
        return hashlib.blake2b(value_text(value).encode(), digest_size=16).hexdigest()
    except ValueError:
        return None
