"""The memory of a search: elimination orders that graphs share, and values of the last graphs.

Both are remembered inside `sharing_orders` only.
"""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar, cast

from ..costgraph import CostGraph

_SHARED: ContextVar[dict[object, Any] | None] = ContextVar(
    "orders that the graphs of a search share", default=None
)
_LAST: ContextVar[dict[object, tuple[CostGraph, Any]] | None] = ContextVar(
    "what is known of the last graphs of a search", default=None
)
T = TypeVar("T")


@contextlib.contextmanager
def sharing_orders() -> Iterator[None]:
    """Let all graphs with the same variables and edges share one order, whatever their tables.

    It is the order of the first of them: to find an order mostly takes longer than to follow it.
    """
    tokens = _SHARED.set({}), _LAST.set({})
    try:
        yield
    finally:
        _SHARED.reset(tokens[0])
        _LAST.reset(tokens[1])


def shared_by(key: object, make: Callable[[], T]) -> T:
    """Return what `make` gives, remembered for the key where orders are shared."""
    known = _SHARED.get()
    if known is None:
        return make()
    if key not in known:
        known[key] = make()
    return cast(T, known[key])


def last_of(kind: object, graph: CostGraph, make: Callable[[T | None], T]) -> T:
    """Return what `make` gives for a graph, remembered for the last graph of each kind.

    It is remembered where orders are shared, and handed to `make` for the next graph.
    """
    known = _LAST.get()
    if known is None:
        return make(None)
    last = known.get(kind)
    # The graph is kept beside the value, so that no later object can pass for it.
    if last is None or last[0] is not graph:
        last = known[kind] = graph, make(None if last is None else last[1])
    return cast(T, last[1])
