"""Plain state as it was before a pass, and what the pass has written of it."""

from __future__ import annotations

import collections
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.facts import (
    GONE,
    LARGEST,
    are_equal,
    attribute,
    inside,
    is_literal,
    is_own_module,
    is_own_type,
)

from .own_code import Uses

OF_TORCH = frozenset({*vars(nn.Module()), "forward"})
"""Attributes of a module that are torch's."""
CONTAINERS = (dict, list, set, collections.deque)
_SEQUENCES = (list, tuple, collections.deque)


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Plain state that a pass has written: what `holder` has under `key` (None: all of it).

    `leaf`: the name under which code finds it; `outer`: that of its container.
    """

    holder: Any
    key: Any
    leaf: Any
    outer: Any
    words: str
    before: Any
    after: Any

    def put(self, value: Any) -> None:
        """Set another value."""
        if isinstance(self.holder, types.CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, list):
            self.holder[:] = value
        elif isinstance(self.holder, (set, collections.deque)):
            self.holder.clear()
            self.holder.update(value) if isinstance(self.holder, set) else self.holder.extend(value)
        elif isinstance(self.holder, type):
            delattr(self.holder, self.key) if value is GONE else setattr(
                self.holder, self.key, value
            )
        elif value is GONE:
            self.holder.pop(self.key, None)
        else:
            self.holder[self.key] = value

    def put_back(self) -> None:
        """Set the value from before; a new attribute stays, as hooks may have come with it."""
        if self.outer is not None or self.before is not GONE:
            self.put(self.before)


@dataclass(slots=True)
class _Noted:
    """A holder of values, as it was; `form`: how code says one of them, {key} alone of a scope."""

    holder: Any
    copy: Any
    form: str
    name: Any


class PlainState:
    """Holders of values that a pass may write."""

    def __init__(self) -> None:
        self._noted: dict[int, _Noted] = {}

    def written(self) -> list[Written]:
        """All that differs from what was noted."""
        return [written for noted in self._noted.values() for written in _changes(noted)]

    def restore(self) -> None:
        """Put back all that was noted: layers that are exported apart have written, too."""
        for noted in self._noted.values():
            for written in _changes(noted, identical=True):
                written.put_back()

    def note_part(self, part: nn.Module, path: str) -> None:
        """Note the attributes of a module, and the numbers of its classes."""
        own = {name: v for name, v in vars(part).items() if name not in OF_TORCH}
        form = f"{path}.{{key}}" if path else "self.{key}"
        self._noted.setdefault(id(vars(part)), _Noted(vars(part), own, form, None))
        for name, value in own.items():
            self.note(value, form.format(key=name), name)
        for kind in type(part).__mro__:
            self.note(kind, kind.__name__, kind.__name__)

    def note_names(self, scope: dict[str, Any], names: dict[str, Any]) -> None:
        """Note globals."""
        noted = self._noted.setdefault(id(scope), _Noted(scope, {}, "{key}", None))
        noted.copy = {**names, **noted.copy}
        for name, value in names.items():
            self.note(value, name, name)

    def note_cell(self, cell: types.CellType, words: str, name: str) -> None:
        """Note a variable of a closure."""
        held = cell.cell_contents
        self._noted.setdefault(id(cell), _Noted(cell, held, words, name))
        self.note(held, words, name)

    def note(self, value: Any, words: str, name: Any) -> None:
        """Note a value and what is behind it."""
        waiting = [(value, words, name)]
        budget = LARGEST
        while waiting and budget:
            value, words, name = waiting.pop()
            held = _holder(value)
            if held is None or id(held) in self._noted:
                continue
            budget -= 1
            copied = _copied(held)
            form = "{words}[{key!r}]" if isinstance(value, CONTAINERS) else "{words}.{key}"
            form = form.replace("{words}", words.replace("{", "{{").replace("}", "}}"))
            self._noted[id(held)] = _Noted(held, copied, form, name)
            for step, key, child in inside(value) if not isinstance(value, type) else ():
                if step is not None:
                    said = form.format(key=key)
                    waiting.append((child, said, key if isinstance(key, str) else name))


def is_read(written: Written, uses: Uses) -> bool:
    """Whether code uses what it has written, but for writing it anew."""
    by_itself = written.leaf in uses.loads
    return by_itself or (isinstance(written.holder, CONTAINERS) and written.outer in uses.loads)


def has_tensors(value: Any) -> bool:
    """Whether a value is of an export: a tensor, or a number that it does not know."""
    of_export = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    if isinstance(value, of_export):
        return True
    return isinstance(value, (*CONTAINERS, tuple)) and any(
        has_tensors(child) for _, _, child in inside(value)
    )


def _holder(value: Any) -> Any:
    """The holder of the values of a container, an object or a class; None: it is looked past."""
    if isinstance(value, CONTAINERS):
        return value
    if isinstance(value, type):
        return value if is_own_type(value) else None
    if isinstance(value, types.ModuleType):
        return vars(value) if is_own_module(value) else None
    if isinstance(value, (Tensor, nn.Module, types.FunctionType, types.MethodType)):
        return None
    own = type(value).__module__.partition(".")[0] not in ("torch", "numpy", "logging", "autopar")
    held = attribute(value, "__dict__") if own else None
    return held if isinstance(held, dict) else None


def _changes(noted: _Noted, *, identical: bool = False) -> Iterator[Written]:
    """All that differs from what was noted, also if it is equal where it has to be `identical`."""
    holder = noted.holder
    before = noted.copy
    pairs = [(None, before, holder)]
    if isinstance(holder, types.CellType):
        pairs = [(None, before, attribute(holder, "cell_contents"))]
    elif isinstance(holder, (type, dict)):
        # Past the methods of a mapping that loads what it is asked for, as transformers' do.
        had = _copied(holder)
        further = had if noted.form != "{key}" else {}
        names = [name for name in {**before, **further} if name not in OF_TORCH]
        pairs = [(key, before.get(key, GONE), had.get(key, GONE)) for key in names]
    for key, was, now in pairs:
        if was is now or (_alike(was, now) and not (identical and key is not None)):
            continue
        yield Written(
            holder=holder,
            key=key,
            leaf=key if isinstance(key, str) else noted.name,
            outer=noted.name,
            words=noted.form.format(key=key) if key is not None else noted.form.partition("[")[0],
            before=was,
            after=_copied(now) if now is holder else now,
        )


def _alike(one: Any, other: Any) -> bool:
    """Whether values are equal, of which only numbers and texts are asked."""
    if type(one) is not type(other) or not isinstance(one, _SEQUENCES):
        return type(one) is type(other) and is_literal(other) and are_equal(one, other)
    pairs = zip(one, other, strict=False)
    return len(one) == len(other) and all(a is b or _alike(a, b) for a, b in pairs)


def _copied(holder: Any) -> Any:
    """A copy of what a holder holds; a class of the user's may have methods of its own."""
    if isinstance(holder, type):
        return dict(vars(holder))
    if isinstance(holder, dict):
        return dict(dict.items(holder))
    kind = next(kind for kind in CONTAINERS if isinstance(holder, kind))
    return kind(holder)
