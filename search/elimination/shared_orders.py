"""The memory of a search: elimination orders that graphs share, and values of the last graphs.

Both are remembered inside `sharing_orders` only. An order is that of the first graph that asks for
it, so a result may depend on what was computed before.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from ..costgraph import CostGraph

T = TypeVar("T")


class Sharing:
    """Values that the graphs of a search share."""

    def __init__(self) -> None:
        self._values: dict[object, Any] = {}
        self._last: dict[object, tuple[CostGraph, Any]] = {}

    def by(self, key: object, make: Callable[[], T]) -> T:
        """Return the value under a key, made if there is none."""
        if key not in self._values:
            self._values[key] = make()
        return cast(T, self._values[key])

    def put(self, key: object, value: object) -> None:
        """Share another value under a key from now on."""
        self._values[key] = value

    def last(self, kind: object, graph: CostGraph, make: Callable[[T | None], T]) -> T:
        """Return the value of the last graph of a kind, made if that was another one."""
        last = self._last.get(kind)
        # The graph is kept beside the value, so that no later object can pass for it.
        if last is None or last[0] is not graph:
            last = self._last[kind] = graph, make(None if last is None else last[1])
        return cast(T, last[1])


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
    return make(None) if shared is None else shared.last(kind, graph, make)
