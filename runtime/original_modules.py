"""A planned module's remains of the original: the tree of submodules and their plain attributes; no tensors or code.

`module.config` is the original's; `module.layers[0]` and `len(module.layers)` work as before. A submodule here holds
parameters and buffers of the plan. It has no forward pass apart from the whole model's, and says so when called.
"""

from __future__ import annotations

import collections
import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.errors import PlanError

_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has of its own."""
_KEPT_WHOLE = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType)
LARGEST = 10_000
"""Objects behind an attribute that are looked at; one with more is not kept."""


class Original:
    """The plain attributes of a module, and its class; copies share it."""

    def __init__(self, module: nn.Module) -> None:
        self.kind = type(module)
        given = {name: value for name, value in vars(module).items() if name not in _OWN and not name.startswith("_")}
        absent = {name: None for held in (module._parameters, module._buffers) for name, value in held.items() if value is None}
        self.attributes = absent | {name: value for name, value in given.items() if _is_plain(value)}

    def __deepcopy__(self, memo: object) -> Original:
        return self

    def read(self, name: str, owner: nn.Module) -> Any:
        """An attribute of the original: its own, its class's, or a property worked out on the planned `owner`."""
        if name in self.attributes:
            return self.attributes[name]
        found = inspect.getattr_static(self.kind, name, None)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(owner)
        if callable(found) or isinstance(found, (classmethod, staticmethod)):
            raise AttributeError(f"{name!r} is a method of {self.kind.__name__}, of which a planned module has only the call and the state")
        if name not in dir(self.kind) or not _is_plain(found):
            raise AttributeError(f"a planned {self.kind.__name__} has no attribute {name!r}")
        return found

    def names(self) -> list[str]:
        """The names that can be read."""
        fixed = {name: inspect.getattr_static(self.kind, name) for name in dir(self.kind) if not name.startswith("_")}
        readable = (n for n, value in fixed.items() if isinstance(value, property) or (not callable(value) and _is_plain(value)))
        return [*self.attributes, *readable]


class Recalling(nn.Module):
    """A module that answers for plain attributes of an original, where there is one."""

    _original: Original | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._original is None or name.startswith("_"):
                raise
        return self._original.read(name, self)

    def __dir__(self) -> list[str]:
        found = super().__dir__()  # type: ignore[no-untyped-call]
        return sorted({*found, *(self._original.names() if self._original is not None else ())})


class OriginalModule(Recalling):
    """A submodule of the original."""

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the plan is of the whole model."""
        name = self._original.kind.__name__ if self._original is not None else "submodule"
        raise PlanError(f"this {name} is part of a planned model and has no forward pass of its own: call the whole planned module")

    def _no_hooks(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: nothing would call them."""
        raise PlanError("parts of a planned model are not called one by one, and hooks on them would never run: put them on the whole")

    register_forward_hook = register_forward_pre_hook = _no_hooks
    register_full_backward_hook = register_full_backward_pre_hook = _no_hooks

    def _get_name(self) -> str:
        return (type(self) if self._original is None else self._original.kind).__name__


class OriginalList(OriginalModule, nn.ModuleList):
    """A list of submodules."""


class OriginalSequence(OriginalModule, nn.Sequential):
    """A sequence of submodules."""


class OriginalDict(OriginalModule, nn.ModuleDict):
    """A dict of submodules."""


class OriginalParameters(OriginalModule, nn.ParameterList):
    """A list of parameters."""


class OriginalNamedParameters(OriginalModule, nn.ParameterDict):
    """A dict of parameters."""


_KINDS: Mapping[type[nn.Module], type[OriginalModule]] = {
    nn.ModuleList: OriginalList, nn.Sequential: OriginalSequence, nn.ModuleDict: OriginalDict, nn.ParameterList: OriginalParameters,
    nn.ParameterDict: OriginalNamedParameters,
}  # fmt: skip


def recall(root: Recalling, module: nn.Module) -> None:
    """Give `root` the submodules of `module`, still without parameters, and the plain attributes of all."""
    root._original = Original(module)
    for name, child in module._modules.items():
        if child is None:
            root._modules[name] = None
        elif is_free(root, name):
            part = _part(child)
            root._modules[name] = part
            recall(part, child)


def _part(module: nn.Module) -> OriginalModule:
    found = next((made for kind, made in _KINDS.items() if isinstance(module, kind)), OriginalModule)()
    if isinstance(module, nn.ParameterList):
        vars(found)["_size"] = len(module)
    if isinstance(module, nn.ParameterDict):
        vars(found)["_keys"] = dict.fromkeys(module.keys())
    return found


def is_free(module: nn.Module, name: str) -> bool:
    """Whether a name is free in a module; its original's attributes do not count."""
    taken = (vars(module), module._parameters, module._buffers, module._modules)
    return bool(name) and not any(name in held for held in taken) and not hasattr(type(module), name)


def _is_plain(value: Any) -> bool:
    """Whether a value leads to no tensor and no module, so that keeping it keeps no weights alive."""
    seen: set[int] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, (Tensor, nn.Module)) or len(seen) > LARGEST:
            return False
        if isinstance(one, _KEPT_WHOLE) or id(one) in seen:
            continue
        seen.add(id(one))
        waiting.extend(_behind(one))
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
        return [*inspect.getclosurevars(value).nonlocals.values(), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    slots = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ()) if isinstance(name, str)]
    return [*getattr(value, "__dict__", {}).values(), *(getattr(value, name, None) for name in slots if not name.startswith("__"))]
