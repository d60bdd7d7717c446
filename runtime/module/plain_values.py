"""Values that lead to no tensor and no module, so that they keep no weights alive."""

from __future__ import annotations

import collections
import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

_ATOMIC = (
    str,
    bytes,
    int,
    float,
    complex,
    bool,
    type(None),
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
)
"""Types whose values are not looked into."""
LARGEST = 10_000
"""Objects behind an attribute that are looked at; one with more is not kept."""


def are_equal(value: object, other: object) -> bool:
    """Whether two values are equal; what cannot say so is not."""
    try:
        return bool(value == other)
    except Exception:
        return False


def is_plain(value: Any) -> bool:
    """Whether a value leads to no tensor and no module, so that it keeps no weights alive."""
    # By identity, since values may not be hashable; all are alive until this returns.
    seen: set[int] = set()
    alive: list[Any] = []
    waiting = [value]
    while waiting:
        present = waiting.pop()
        if isinstance(present, (Tensor, nn.Module)) or len(seen) > LARGEST:
            return False
        if isinstance(present, _ATOMIC) or id(present) in seen:
            continue
        seen.add(id(present))
        alive.append(present)
        waiting.extend(_behind(present))
    return True


def _behind(value: Any) -> Iterable[Any]:
    """The values that a value holds."""
    if isinstance(value, Mapping):
        return [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple, set, frozenset, collections.deque)):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return [
            *inspect.getclosurevars(value).nonlocals.values(),
            *(value.__defaults__ or ()),
            *(value.__kwdefaults__ or {}).values(),
        ]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    values = list(getattr(value, "__dict__", {}).values())
    for kind in type(value).__mro__:
        for name in getattr(kind, "__slots__", ()):
            if isinstance(name, str) and not name.startswith("__"):
                values.append(getattr(value, name, None))
    return values
