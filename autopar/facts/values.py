"""Facts of a program: plain values that its trace has read, and whether they are as they were."""

from __future__ import annotations

import copy
import functools
import inspect
import types
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from .plain import (
    LARGEST,
    MACHINERY,
    SEQUENCES,
    Step,
    are_equal,
    attribute,
    inside,
    is_literal,
    is_own_module,
    is_own_type,
    is_plain,
    item,
)

_METHODS = (types.FunctionType, property, classmethod, staticmethod, functools.cached_property)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fact:
    """A value that is found from `root` by `steps` and is as planned while `holds` is true of it.

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

    of_code: tuple[Fact, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    whole: Collection[str] = frozenset()


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
        if everything and (holds := _as_now(value)) is not None:
            told = is_literal(value) or isinstance(value, np.ndarray)
            yield made(holds=holds, was=repr(value)[:100] if told else "")
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
                isinstance(value, SEQUENCES)
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
        return type(value).__module__.partition(".")[0] not in MACHINERY

    def _held(self, value: Any) -> Iterator[tuple[Step | None, Any, Any]]:
        """The values that a value holds; an object has what its classes hold, too."""
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


def _as_now(value: Any) -> Callable[[Any], bool] | None:
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
