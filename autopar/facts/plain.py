"""Values that are plain: of own code, made of numbers and texts, and what they hold."""

from __future__ import annotations

import collections
import functools
import inspect
import os
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LARGEST = 10_000
"""Objects behind a value that are looked at; one with more is not kept."""
GONE = "nothing"
"""Stands for a value that is not there."""
_LITERALS = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, range),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_ATOMIC = (*_LITERALS, type, types.ModuleType, types.BuiltinFunctionType)
"""Types whose values are not looked into."""
SEQUENCES = (list, tuple, collections.deque)
MACHINERY = ("torch", "numpy", "sympy", "autopar", "huggingface_hub", "typing_extensions.py")
_LIBRARY = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_SITES = (
    *(f"{os.sep}{site}{os.sep}" for site in ("site-packages", "dist-packages")),
    f"{Path(torch.__file__).parents[1]}{os.sep}",
)
_HERE = Path(__file__).parents[1]
_LINKED = (path.resolve() for path in _HERE.iterdir() if path.is_symlink())
_PRODUCT = tuple(f"{path}{os.sep}" for path in (_HERE, _HERE.resolve(), *_LINKED))
Step = tuple[Callable[[Any, Any], Any], Any]
"""How a value is got from another: a function of that one and of a key."""


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file is of a model's own code: not of torch, of this package or of Python."""
    parts = Path(file).parts
    if file.startswith(("<frozen", "<string>", *_PRODUCT)):
        return False
    if any(site in file for site in _SITES):
        return not any(name in parts for name in MACHINERY)
    return not file.startswith(_LIBRARY)


def is_own_type(kind: type) -> bool:
    """Whether a class is of a model's own code."""
    return is_own_module(sys.modules.get(kind.__module__))


def is_own_module(module: types.ModuleType | None) -> bool:
    """Whether a module of Python is a model's own; a script that is typed in has no file."""
    file = getattr(module, "__file__", None)
    return module is not None and (module.__name__ == "__main__" if file is None else is_own(file))


def are_equal(value: object, other: object) -> bool:
    """Whether two values are equal; what cannot say so is not."""
    try:
        return bool(value == other)
    except Exception:
        return False


def is_literal(value: object) -> bool:
    """Whether a value is made of numbers and texts, so that its `repr` tells all of it."""
    if isinstance(value, Mapping):
        return all(is_literal(item) for pair in _pairs(value) for item in pair)
    if isinstance(value, (*SEQUENCES, set, frozenset)):
        return all(map(is_literal, value))
    return isinstance(value, _LITERALS)


def is_plain(value: Any) -> bool:
    """Whether a value leads to no tensor and no module, so that it keeps no weights alive."""
    # By identity, since values may not be hashable; all are alive until this returns.
    seen: dict[int, Any] = {}
    waiting = [value]
    while waiting:
        present = waiting.pop()
        if isinstance(present, (Tensor, nn.Module)) or len(seen) > LARGEST:
            return False
        if not isinstance(present, _ATOMIC) and id(present) not in seen:
            seen[id(present)] = present
            waiting.extend(child for _, _, child in inside(present))
    return True


def item(value: Any, key: Any) -> Any:
    """An item of a container."""
    if isinstance(value, dict):
        return dict.get(value, key, GONE)  # a class of the user's may make what is asked for
    try:
        return value[key]
    except (KeyError, IndexError, TypeError):
        return GONE


def _pairs(value: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    return list(dict.items(value) if isinstance(value, dict) else value.items())


def attribute(value: Any, key: str) -> Any:
    """An attribute of an object."""
    try:
        return getattr(value, key, GONE)
    except Exception:
        return GONE  # an empty cell, or code of an object that fails


def inside(value: Any) -> Iterator[tuple[Step | None, Any, Any]]:
    """The values that a value holds: the step to each, and the key under which it is found."""
    if isinstance(value, Mapping):
        pairs = _pairs(value)
        yield from ((None, None, key) for key, _ in pairs)
        yield from (((item, key), key, held) for key, held in pairs)
    elif isinstance(value, SEQUENCES):
        yield from (((item, place), place, held) for place, held in enumerate(value))
    elif isinstance(value, (set, frozenset)):
        yield from ((None, None, held) for held in value)
    elif isinstance(value, types.FunctionType):
        nonlocals = inspect.getclosurevars(value).nonlocals.values()
        given = (*nonlocals, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        yield from ((None, None, held) for held in given)
    else:
        slots = (name for kind in type(value).__mro__ for name in _slots(kind))
        names = ["__self__", "__func__"] if isinstance(value, types.MethodType) else list(slots)
        if isinstance(value, functools.partial):
            names = ["func", "args", "keywords"]
        names += list(getattr(value, "__dict__", {}))
        for name in names:
            yield (attribute, name), name, attribute(value, name)


def _slots(kind: type) -> Iterator[str]:
    slots = getattr(kind, "__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if isinstance(name, str) and not name.startswith("__"):
            yield name
