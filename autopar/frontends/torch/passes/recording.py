"""Records the code that a module's forward pass runs, and the plain state that it writes.

Functions that run are seen by `sys.settrace`, with their lines; torch's are left. Before the first
line of a function the state that it can reach by its globals and closure is noted, as is that of
the module before the pass. What differs after the pass was written by it, and is put back.
"""

from __future__ import annotations

import functools
import gc
import operator
import os
import random
import sys
import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.facts import (
    GONE,
    Fact,
    Facts,
    FactsOf,
    attribute,
    is_literal,
    is_own,
    is_own_type,
    item,
)

from .own_code import Uses, codes_within
from .plain_state import CONTAINERS, PlainState, Written, has_tensors

_ASKED = frozenset({"get_default_dtype", "is_grad_enabled", "get_float32_matmul_precision"})
_GIVING = (Iterator, random.Random, np.random.Generator, np.random.RandomState)
_CLOCKS = frozenset({"time", "datetime", "uuid", "secrets"})
_ENVIRONMENT = type(os.environ).__getitem__.__code__
_AROUND = (os.__file__, "<frozen _collections_abc>", "<frozen os>")


class Recording:
    """The record of what the passes of a module have run and written."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.lines: dict[types.CodeType, set[int]] = {}
        self.globals: dict[types.CodeType, dict[str, Any]] = {}
        self.written: list[Written] = []
        self.environment: dict[str, str] = {}
        self.state = PlainState()
        self._functions: dict[types.CodeType, list[types.FunctionType]] = {}

    # --- while it runs ---

    def begin(self, *_: Any) -> None:
        """A pass of the module begins."""
        self.state.restore()
        for path, part in self.module.named_modules():
            self.state.note_part(part, path)
        sys.settrace(self._called)

    def end(self, *_: Any) -> None:
        """A pass has ended: what it has written is put back."""
        sys.settrace(None)
        self.written = self.state.written()
        for written in self.written:
            # Torch itself refuses tensors that a pass sets as attributes.
            if written.outer is not None or not has_tensors(written.after):
                written.put_back()

    def _called(self, frame: types.FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code is _ENVIRONMENT:
            self._asked(frame)
        if not is_own(code.co_filename):
            return None
        if code not in self.lines:
            self.lines[code] = set()
            if not any(scope is frame.f_globals for scope in self.globals.values()):
                self._learn(frame.f_globals)
            self.globals[code] = frame.f_globals
            self._reach(code, frame.f_globals)
        lines = self.lines[code]

        def ran(frame: types.FrameType, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return ran

        return ran

    def _learn(self, scope: dict[str, Any]) -> None:
        """Note the functions of a module, by their code.

        Those who refer to its names are asked for, as `gc.get_objects` writes the count of all
        objects: a forked process would copy every page of its parent.
        """
        # Frozen objects are not asked. To freeze them anew would keep the rest, too.
        gc.unfreeze()
        for value in gc.get_referrers(scope):
            if type(value) is types.FunctionType:
                self._functions.setdefault(value.__code__, []).append(value)

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
        self.state.note_names(scope, {name: scope[name] for name in code.co_names if name in scope})
        for words, cell, name in self._cells(code):
            self.state.note_cell(cell, words, name)
        for held, key in self._defaults(code):
            self.state.note(
                item(held, key), f"a default of {code.co_name}", _parameter(code, held, key)
            )

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
                yield from ((held, key) for key in keys if isinstance(held[key], CONTAINERS))

    # --- afterwards ---

    def uses(self) -> Uses:
        """Names that the code that ran looks up, and those that it writes."""
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
        facts: list[Fact] = []
        for code, scope in self.globals.items():
            for inner in codes_within(code):
                for name in {*inner.co_names} & uses.roots.keys() & scope.keys():
                    step = ((item, name),)
                    facts += find.of(scope, step, name, name, uses.roots[name])
            for words, cell, name in self._cells(code):
                step = ((attribute, "cell_contents"),)
                facts += find.of(cell, step, words, name, uses.steps.get(name, ""))
            for held, key in self._defaults(code):
                name = _parameter(code, held, key)
                words = f"a default of {code.co_name}"
                facts += find.of(held, ((item, key),), words, name, uses.steps.get(name, ""))
        for kind in {kind for part in self.module.modules() for kind in type(part).__mro__}:
            if is_own_type(kind):
                facts += find.of(kind, (), kind.__name__, kind.__name__, "")
        for name, place in self.environment.items():
            words = f"os.environ[{name!r}]"
            facts += find.of(os.environ, ((item, name),), words, name, place)
        facts += _of_torch(uses)
        mine = {w.words for w in written}
        once = {(id(f.root), f.words): f for f in facts if not _is_of(f.words, mine)}
        return Facts(of_code=tuple(once.values()), names=uses.steps, whole=whole)

    def clocks(self, uses: Uses) -> str | None:
        """The place where the code asks a clock, a generator or an iterator, if it does."""
        parts = [(uses.steps, vars(part)) for part in self.module.modules()]
        for names, scope in (*((uses.roots, scope) for scope in self.globals.values()), *parts):
            for name in names.keys() & scope.keys():
                value = scope[name]
                known = {getattr(value, "__name__", None), getattr(value, "__module__", None)}
                if known & _CLOCKS or isinstance(value, _GIVING):
                    return names[name]
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


@contextmanager
def recorded(module: nn.Module) -> Iterator[Recording]:
    """Record the passes of a module, and put back what they write."""
    recording = Recording(module)
    before = sys.gettrace()
    # Garbage is collected at any line of a pass, and what is called then is none of its code.
    callbacks = list(gc.callbacks)
    gc.callbacks.clear()
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
        gc.callbacks[:] = callbacks
        recording.state.restore()


def _is_of(words: str, written: set[str]) -> bool:
    """Whether a value in words is one that was written, in one, or holds one."""
    return any(
        one == other or one.startswith((f"{other}.", f"{other}["))
        for w in written
        for one, other in ((words, w), (w, words))
    )
