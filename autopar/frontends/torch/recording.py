"""Records the code that a module's forward pass runs, and the plain state that it writes.

Functions that run are seen by `sys.settrace`, with their lines; torch's are left. Before the first
line of a function the state that it can reach by its globals and closure is noted, as is that of
the module before the pass. What differs after the pass was written by it, and is put back.
"""

from __future__ import annotations

import collections
import functools
import gc
import operator
import os
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autopar.facts import (
    GONE,
    LARGEST,
    Fact,
    Facts,
    FactsOf,
    are_equal,
    attribute,
    inside,
    is_literal,
    is_own,
    is_own_module,
    is_own_type,
    item,
)

from .own_code import Uses, codes_within

_OF_TORCH = frozenset({*vars(nn.Module()), "forward"})
_CONTAINERS = (dict, list, set, collections.deque)
_SEQUENCES = (list, tuple, collections.deque)
_ASKED = frozenset({"get_default_dtype", "is_grad_enabled", "get_float32_matmul_precision"})
_CLOCKS = frozenset({"time", "datetime", "uuid", "secrets"})
_ENVIRONMENT = type(os.environ).__getitem__.__code__
_AROUND = (os.__file__, "<frozen _collections_abc>", "<frozen os>")


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


class Recording:
    """What the passes of a module have run and written."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.lines: dict[types.CodeType, set[int]] = {}
        self.globals: dict[types.CodeType, dict[str, Any]] = {}
        self.written: list[Written] = []
        self.environment: dict[str, str] = {}
        self._noted: dict[int, _Noted] = {}
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}

    # --- while it runs ---

    def begin(self, *_: Any) -> None:
        """A pass of the module begins."""
        self.restore()
        for value in gc.get_objects() if not self._functions else ():
            if type(value) is types.FunctionType and is_own(value.__code__.co_filename):
                self._functions.setdefault(value.__code__, []).append(value)
        for path, part in self.module.named_modules():
            own = {name: v for name, v in vars(part).items() if name not in _OF_TORCH}
            form = f"{path}.{{key}}" if path else "self.{key}"
            self._noted.setdefault(id(vars(part)), _Noted(vars(part), own, form, None))
            for name, value in own.items():
                self._note(value, form.format(key=name), name)
            for kind in type(part).__mro__:
                self._note(kind, kind.__name__, kind.__name__)
        sys.settrace(self._called)

    def end(self, *_: Any) -> None:
        """A pass has ended: what it has written is put back."""
        sys.settrace(None)
        self.written = [w for noted in self._noted.values() for w in _changes(noted)]
        for written in self.written:
            # Torch itself refuses tensors that a pass sets as attributes.
            if written.outer is not None or not has_tensors(written.after):
                written.put_back()

    def restore(self) -> None:
        """Put back all that was noted: layers that are exported apart have written, too."""
        for noted in self._noted.values():
            for written in _changes(noted, identical=True):
                written.put_back()

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code is _ENVIRONMENT:
            self._asked(frame)
        if not is_own(code.co_filename):
            return None
        if code not in self.lines:
            self.lines[code] = set()
            self.globals[code] = frame.f_globals
            self._reach(code, frame.f_globals)
        lines = self.lines[code]

        def ran(frame: types.FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return ran

        return ran

    def _asked(self, frame: types.FrameType) -> None:
        """A variable of the environment that own code asks for."""
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename in _AROUND:
            caller = caller.f_back
        if caller is not None and is_own(caller.f_code.co_filename):
            place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
            self.environment.setdefault(frame.f_locals["key"], place)

    def _reach(self, code: types.CodeType, scope: dict[str, Any]) -> None:
        """Note the state that a function reaches."""
        names = {name: scope[name] for name in code.co_names if name in scope}
        noted = self._noted.setdefault(id(scope), _Noted(scope, {}, "{key}", None))
        noted.copy = {**names, **noted.copy}
        for name, value in names.items():
            self._note(value, name, name)
        for words, cell, name in self._cells(code):
            held = cell.cell_contents
            self._noted.setdefault(id(cell), _Noted(cell, held, words, name))
            self._note(held, words, name)
        for held, key in self._defaults(code):
            self._note(item(held, key), f"a default of {code.co_name}", _parameter(code, held, key))

    def _cells(self, code: types.CodeType) -> Iterator[tuple[str, types.CellType, str]]:
        for function in self._functions.get(code, ()):
            for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=False):
                # Functions in closures are those that decorators wrap, and stay.
                held = attribute(cell, "cell_contents")
                if held is not GONE and not isinstance(held, (type, types.FunctionType)):
                    yield f"{name} of {code.co_name}", cell, name

    def _defaults(self, code: types.CodeType) -> Iterator[tuple[Any, Any]]:
        """The containers among the defaults of a function's arguments."""
        for function in self._functions.get(code, ()):
            defaults: tuple[Any, ...] = (function.__defaults__ or (), function.__kwdefaults__ or {})
            for held in defaults:
                keys: Iterable[Any] = held if isinstance(held, dict) else range(len(held))
                yield from ((held, key) for key in keys if isinstance(held[key], _CONTAINERS))

    def _note(self, value: Any, words: str, name: Any) -> None:
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
            form = "{words}[{key!r}]" if isinstance(value, _CONTAINERS) else "{words}.{key}"
            form = form.replace("{words}", words.replace("{", "{{").replace("}", "}}"))
            self._noted[id(held)] = _Noted(held, copied, form, name)
            for step, key, child in inside(value) if not isinstance(value, type) else ():
                if step is not None:
                    said = form.format(key=key)
                    waiting.append((child, said, key if isinstance(key, str) else name))

    # --- afterwards ---

    def uses(self) -> Uses:
        """What the code that ran looks up, and what it writes."""
        uses = Uses()
        within = {c for code in self.lines for c in codes_within(code) if c is not code}
        by_file: dict[str, set[int]] = {}
        for code, lines in self.lines.items():
            by_file.setdefault(code.co_filename, set()).update(lines)
        for code in self.lines:
            if code not in within:
                uses.of_code(code, by_file[code.co_filename])
        return uses.close()

    def facts(self, uses: Uses, written: list[Written]) -> Facts:
        """The facts of the code that ran, without what it has written itself."""
        whole = frozenset(uses.loads)
        find = FactsOf(uses.steps, whole)
        found: list[Fact] = []
        for code, scope in self.globals.items():
            for inner in codes_within(code):
                for name in {*inner.co_names} & uses.roots.keys() & scope.keys():
                    step = ((item, name),)
                    found += find.of(scope, step, name, name, uses.roots[name])
            for words, cell, name in self._cells(code):
                step = ((attribute, "cell_contents"),)
                found += find.of(cell, step, words, name, uses.steps.get(name, ""))
            for held, key in self._defaults(code):
                name = _parameter(code, held, key)
                words = f"a default of {code.co_name}"
                found += find.of(held, ((item, key),), words, name, uses.steps.get(name, ""))
        for kind in {kind for part in self.module.modules() for kind in type(part).__mro__}:
            if is_own_type(kind):
                found += find.of(kind, (), kind.__name__, kind.__name__, "")
        for name, place in self.environment.items():
            words = f"os.environ[{name!r}]"
            found += find.of(os.environ, ((item, name),), words, name, place)
        found += _of_torch(uses)
        mine = {w.words for w in written}
        once = {(id(f.root), f.words): f for f in found if not _is_of(f.words, mine)}
        return Facts(found=tuple(once.values()), names=uses.steps, whole=whole)

    def clocks(self, uses: Uses) -> str | None:
        """The place where the code asks a clock, if it does."""
        for scope in self.globals.values():
            for name in uses.roots.keys() & scope.keys():
                value = scope[name]
                known = {getattr(value, "__name__", None), getattr(value, "__module__", None)}
                if known & _CLOCKS:
                    return uses.roots[name]
        return None


def _parameter(code: types.CodeType, defaults: Any, key: Any) -> str:
    """The name of the argument that has a default."""
    given = code.co_varnames[: code.co_argcount]
    return str(key) if isinstance(defaults, dict) else given[key - len(defaults)]


def _of_torch(uses: Uses) -> Iterator[Fact]:
    """The flags of torch that code asks for."""
    for name in _ASKED & uses.steps.keys():
        value = getattr(torch, name)()
        holds = functools.partial(operator.eq, value)
        step = ((_called, name),)
        place = uses.steps[name]
        yield Fact(
            root=torch,
            steps=step,
            holds=holds,
            words=f"torch.{name}()",
            was=str(value),
            place=place,
        )
    if "backends" not in uses.steps:
        return
    find = FactsOf(uses.steps, ())
    for kind, flags in (*vars(torch.backends).items(), ("cuda.matmul", torch.backends.cuda.matmul)):
        for name in uses.steps:
            if is_literal(attribute(flags, name)) and attribute(flags, name) is not GONE:
                words = f"torch.backends.{kind}.{name}"
                yield from find.of(flags, ((attribute, name),), words, name, uses.steps[name])


def _called(module: Any, name: str) -> Any:
    return getattr(module, name)()


def is_read(written: Written, uses: Uses) -> bool:
    """Whether code uses what it has written, but for writing it anew."""
    by_itself = written.leaf in uses.loads
    return by_itself or (isinstance(written.holder, _CONTAINERS) and written.outer in uses.loads)


def has_tensors(value: Any) -> bool:
    """Whether a value is of an export: a tensor, or a number that it does not know."""
    of_export = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)
    if isinstance(value, of_export):
        return True
    return isinstance(value, (*_CONTAINERS, tuple)) and any(
        has_tensors(child) for _, _, child in inside(value)
    )


@contextmanager
def recorded(module: nn.Module) -> Iterator[Recording]:
    """Record the passes of a module, and put back what they write."""
    recording = Recording(module)
    before = sys.gettrace()
    hooks = (
        module.register_forward_pre_hook(recording.begin),
        module.register_forward_hook(recording.end, always_call=True),
    )
    try:
        yield recording
    finally:
        for hook in hooks:
            hook.remove()
        sys.settrace(before)
        recording.restore()


def _holder(value: Any) -> Any:
    """What holds the values of a container, an object or a class; None: it is looked past."""
    if isinstance(value, _CONTAINERS):
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
    """What differs from what was noted, also if it is equal where it has to be `identical`."""
    holder, before = noted.holder, noted.copy
    pairs = [(None, before, holder)]
    if isinstance(holder, types.CellType):
        pairs = [(None, before, attribute(holder, "cell_contents"))]
    elif isinstance(holder, (type, dict)):
        present = vars(holder) if isinstance(holder, type) else holder
        further = present if noted.form != "{key}" else {}
        names = [name for name in {**before, **further} if name not in _OF_TORCH]
        had = dict(present)
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
    kind = next(kind for kind in _CONTAINERS if isinstance(holder, kind))
    return kind(holder)


def _is_of(words: str, written: set[str]) -> bool:
    """Whether a value in words is one that was written, in one, or holds one."""
    return any(
        one == other or one.startswith((f"{other}.", f"{other}["))
        for w in written
        for one, other in ((words, w), (w, words))
    )
