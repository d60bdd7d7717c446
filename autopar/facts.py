"""Facts of a program: plain values that its trace has read, and whether they are as they were."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
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
_METHODS = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)
_SEQUENCES = (list, tuple, collections.deque)
_MACHINERY = ("torch", "numpy", "sympy", "autopar", "huggingface_hub", "typing_extensions.py")
_LIBRARY = tuple(f"{sysconfig.get_path(name)}{os.sep}" for name in ("stdlib", "platstdlib"))
_SITES = tuple(f"{os.sep}{site}{os.sep}" for site in ("site-packages", "dist-packages"))
_HERE = Path(__file__).parent
_LINKED = (path.resolve() for path in _HERE.iterdir() if path.is_symlink())
_PRODUCT = tuple(f"{path}{os.sep}" for path in (_HERE, _HERE.resolve(), *_LINKED))
Step = tuple[Callable[[Any, Any], Any], Any]
"""How a value is got from another: a function of that one and of a key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """What is found from `root` by `steps` is as planned while `holds` is true of it.

    `words`: how code says it. `was`: the value. `place`: the file and line of its read.
    """

    root: Any
    steps: tuple[Step, ...]
    holds: Callable[[Any], bool]
    words: str
    was: str
    place: str

    def present(self) -> Any:
        """The present value."""
        value = self.root
        for get, key in self.steps:
            value = get(value, key)
        return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The facts of a program outside its module's own attributes.

    `names`: those that its code looks up, of attributes and items, with their places. `whole`: the
    names of containers of which it looks at everything.
    """

    found: tuple[Fact, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    whole: Collection[str] = frozenset()


@functools.cache
def is_own(file: str) -> bool:
    """Whether a file is of a model's own code: not of torch, of this package or of Python."""
    parts = Path(file).parts
    if file.startswith(("<frozen", "<string>", *_PRODUCT)):
        return False
    if any(site in file for site in _SITES):
        return not any(name in parts for name in _MACHINERY)
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
        return all(is_literal(item) for pair in value.items() for item in pair)
    if isinstance(value, (*_SEQUENCES, set, frozenset)):
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
    try:
        return value[key]
    except (KeyError, IndexError, TypeError):
        return GONE


def attribute(value: Any, key: str) -> Any:
    """An attribute of an object."""
    try:
        return getattr(value, key, GONE)
    except Exception:
        return GONE  # an empty cell, or code of an object that fails


def inside(value: Any) -> Iterator[tuple[Step | None, Any, Any]]:
    """The values that a value holds: the step to each, and the key under which it is found."""
    if isinstance(value, Mapping):
        yield from ((None, None, key) for key in list(value))
        yield from (((item, key), key, held) for key, held in list(value.items()))
    elif isinstance(value, _SEQUENCES):
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


class FactsOf:
    """Finds the facts behind values: under `names`, and all of the containers that are `whole`."""

    def __init__(self, names: Mapping[str, str], whole: Collection[str]) -> None:
        self.names = names
        self.whole = whole
        self.seen: dict[int, Any] = {}

    def of(
        self, root: Any, steps: tuple[Step, ...], words: str, key: Any, place: str
    ) -> Iterator[Fact]:
        """The facts of what is found from a root by steps, under a key."""
        made = functools.partial(Fact, root=root, steps=steps, words=words, place=place)
        value = made(holds=bool, was="").present()
        everything = (
            not isinstance(value, Mapping)
            or key in self.whole
            or not any(isinstance(name, str) and name in self.names for name in value)
        )
        if everything and (holds := _kept(value)) is not None:
            said = is_literal(value) or isinstance(value, np.ndarray)
            yield made(holds=holds, was=repr(value)[:100] if said else "")
            return
        if not self._looked_into(value) or len(self.seen) > LARGEST:
            return
        if id(value) in self.seen:
            yield made(holds=functools.partial(_is, _reference(value)), was="")
            return
        self.seen[id(value)] = value
        if isinstance(value, type) and steps:
            yield made(holds=functools.partial(_is, _reference(value)), was="")
        for step, name, child in self._held(value):
            if step is None or not (
                isinstance(value, _SEQUENCES)
                or (isinstance(value, Mapping) and everything)
                or name in self.names
                or isinstance(value, (functools.partial, types.MethodType))
            ):
                continue
            by_item = step[0] is item
            said = f"{words}[{name!r}]" if by_item else f"{words}.{name}"
            inner = name if isinstance(name, str) else key
            replaceable = isinstance(value, type) and isinstance(child, types.FunctionType)
            if replaceable or not isinstance(child, _METHODS):
                yield from self.of(root, (*steps, step), said, inner, self.names.get(inner, place))

    def _looked_into(self, value: Any) -> bool:
        if isinstance(value, type):
            return is_own_type(value)
        if isinstance(value, types.ModuleType):
            return is_own_module(value)
        if isinstance(value, (nn.Module, Tensor, types.FunctionType)):
            return False
        return type(value).__module__.partition(".")[0] not in _MACHINERY

    def _held(self, value: Any) -> Iterator[tuple[Step | None, Any, Any]]:
        """What a value holds; an object has what its classes hold, too."""
        if isinstance(value, types.ModuleType):
            yield from (((attribute, name), name, held) for name, held in vars(value).items())
            return
        own = getattr(value, "__dict__", {})
        if not isinstance(value, type):
            yield from inside(value)
        kinds = value.__mro__ if isinstance(value, type) else type(value).__mro__
        for kind in filter(is_own_type, kinds):
            for name, held in list(vars(kind).items()):
                hidden = name in own and not isinstance(value, type)
                if not (hidden or name.startswith("__") or inspect.ismemberdescriptor(held)):
                    yield (attribute, name), name, held


def _kept(value: Any) -> Callable[[Any], bool] | None:
    """Tells whether a value is as it is now; None if it has to be looked into."""
    if is_literal(value):
        return functools.partial(_equals, copy.deepcopy(value))
    if isinstance(value, Tensor):
        return functools.partial(_unwritten, weakref.ref(value), value._version)
    if isinstance(value, np.ndarray) and value.nbytes <= LARGEST:
        return functools.partial(_same_numbers, value.copy())
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType)):
        return functools.partial(_is, _reference(value))
    return None


def _reference(value: Any) -> Callable[[], Any]:
    """A reference that keeps no weights alive."""
    try:
        return weakref.ref(value)
    except TypeError:
        return functools.partial(_given, value if is_plain(value) else None)


def _given(value: Any) -> Any:
    return value


def _equals(planned: Any, value: Any) -> bool:
    return value is planned or (type(value) is type(planned) and are_equal(value, planned))


def _is(reference: Callable[[], Any], value: Any) -> bool:
    return reference() is value


def _unwritten(reference: Callable[[], Any], version: int, value: Any) -> bool:
    return reference() is value and value._version == version


def _same_numbers(planned: Any, value: Any) -> bool:
    return type(value) is type(planned) and bool(np.array_equal(value, planned))
