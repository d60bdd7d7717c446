"""The memory of a search: elimination orders that graphs share, and values of the last graphs.

Both are remembered inside `sharing_orders` only. An order is that of the first graph that asks for
it, so a result may depend on what was computed before. `resting` tells on which orders one rests:
where those are the same, another process finds the same result.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from ..costgraph import CostGraph

T = TypeVar("T")
Entry = tuple[object, Any]
"""A key, and the value that is shared under it from then on."""


@dataclass(slots=True, kw_only=True)
class Rest:
    """The basis of a result beside its arguments.

    `entries`: numbers of the shared entries that were used. `alone`: nothing else was; it made no
    entry of its own, and followed no graph before it.
    """

    entries: set[int] = field(default_factory=set)
    alone: bool = True

    def add(self, other: "Rest") -> None:
        """Rest on all that another result rests on, too."""
        self.entries |= other.entries
        self.alone &= other.alone


class Sharing:
    """Values that the graphs of a search share, with a log: the last entry of a key holds."""

    def __init__(self) -> None:
        self.log: list[Entry] = []
        self._places: dict[object, int] = {}
        self._last: dict[object, tuple[CostGraph, Any]] = {}
        self._rests: list[Rest] = []

    def by(self, key: object, make: Callable[[], T]) -> T:
        """Return the value under a key, made if there is none."""
        if key not in self._places:
            self._step_aside()
            self.put(key, make())
        place = self._places[key]
        if self._rests:
            self._rests[-1].entries.add(place)
        return cast(T, self.log[place][1])

    def put(self, key: object, value: object) -> None:
        """Share another value under a key from now on."""
        self._step_aside()
        self._places[key] = len(self.log)
        self.log.append((key, value))

    def last(self, kind: object, graph: CostGraph, make: Callable[[T | None], T]) -> T:
        """Return the value of the last graph of a kind, made if that was another one."""
        last = self._last.get(kind)
        # The graph is kept beside the value, so that no later object can pass for it.
        if last is None or last[0] is not graph:
            last = self._last[kind] = graph, make(None if last is None else last[1])
        return cast(T, last[1])

    def follow(self) -> None:
        """Note that the present result depends on a graph before it."""
        self._step_aside()

    def _step_aside(self) -> None:
        """Note that the present result rests on more than what is shared already."""
        if self._rests:
            self._rests[-1].alone = False

    def use(self, rest: Rest) -> None:
        """Note that the present result rests on another one."""
        if self._rests:
            self._rests[-1].add(rest)

    @contextlib.contextmanager
    def resting(self) -> Iterator[Rest]:
        """Note on what the result that is computed inside rests."""
        rest = Rest()
        self._rests.append(rest)
        try:
            yield rest
        finally:
            self._rests.pop()
            self.use(rest)


_SHARING: ContextVar[Sharing | None] = ContextVar("what the graphs of a search share", default=None)


@contextlib.contextmanager
def sharing_orders() -> Iterator[None]:
    """Let all graphs with the same variables and edges share one order, whatever their tables.

    It is the order of the first of them: to find an order mostly takes longer than to follow it.
    """
    token = _SHARING.set(Sharing())
    try:
        yield
    finally:
        _SHARING.reset(token)


def sharing() -> Sharing | None:
    """The values that graphs share here, if they do."""
    return _SHARING.get()


@contextlib.contextmanager
def resting() -> Iterator[Rest]:
    """Note on what the result that is computed inside rests beside its arguments."""
    shared = _SHARING.get()
    if shared is None:
        yield Rest()
        return
    with shared.resting() as rest:
        yield rest


def shared_by(key: object, make: Callable[[], T]) -> T:
    """Return what `make` gives, remembered for the key where orders are shared."""
    shared = _SHARING.get()
    return make() if shared is None else shared.by(key, make)


def share(key: object, value: object) -> None:
    """Remember a value for the key from now on, where orders are shared."""
    shared = _SHARING.get()
    if shared is not None:
        shared.put(key, value)


def last_of(kind: object, graph: CostGraph, make: Callable[[], T]) -> T:
    """Return what `make` gives for a graph, remembered for the last graph of each kind.

    It is remembered where orders are shared.
    """
    shared = _SHARING.get()
    return make() if shared is None else shared.last(kind, graph, lambda _: make())


def following(kind: object, graph: CostGraph, make: Callable[[T | None], T]) -> T:
    """Return what `make` gives for a graph and the value of the last one of its kind (or None).

    It is remembered as by `last_of`.
    """
    shared = _SHARING.get()
    if shared is None:
        return make(None)
    shared.follow()
    return shared.last(kind, graph, make)
