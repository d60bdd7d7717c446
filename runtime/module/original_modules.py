"""The original module's tree of submodules and their plain attributes, without tensors or code.

`module.config` is the original's; `module.layers[0]` and `len(module.layers)` work as before. A
submodule here holds parameters and buffers of the plan. It has no forward pass apart from the whole
model's, and says so when called.
"""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn

from autopar.errors import PlanError

from .changes import Change, is_literal, refused
from .own_state import OwnState

_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has of its own."""
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


class _Unkept:
    """Stands for a value that leads to a tensor or a module, and equals no other."""


class Original:
    """The plain attributes of a module, and its class; copies share it.

    `path`: of the module in the whole. `read`: the values of the attributes that the program rests
    on, by name. `copies`: of those that can change in place. `fields`: numbers and texts of the
    objects among them, a configuration say.
    """

    def __init__(self, module: nn.Module, path: str, reads: Mapping[str, frozenset[str]]) -> None:
        self.kind = type(module)
        self.path = path
        self.read: dict[str, Any] = {}
        self.copies: dict[str, Any] = {}
        self.fields: dict[str, dict[str, Any]] = {}
        self.attributes: dict[str, Any] = {}
        # A bias that is None is read as an attribute, too.
        for registered in (module._parameters, module._buffers):
            self.attributes.update((name, None) for name, v in registered.items() if v is None)
        for name, value in vars(module).items():
            if name not in _OWN and not name.startswith("_") and is_plain(value):
                self.attributes[name] = value
        for name in sorted(reads.get(path, ())):
            self._note(name, module, reads)

    def _note(self, name: str, module: nn.Module, reads: Mapping[str, frozenset[str]]) -> None:
        """Keep the value of an attribute that the program rests on."""
        child = module._modules.get(name)
        below = f"{self.path}.{name}" if self.path else name
        # Torch itself looks at all submodules, also at those that the code does not use.
        used = any(path == below or path.startswith(f"{below}.") for path in reads)
        held = name in module._parameters or name in module._buffers or name == "training"
        # The whole module's own forward pass may be wrapped: what is wrapped then is this one's.
        wrapped = not self.path and name == "forward"
        if held or wrapped or (child is not None and not used):
            return
        value = inspect.getattr_static(module, name, None) if child is None else child
        plain = is_plain(value) and not isinstance(value, property)
        self.read[name] = value if plain else _Unkept()
        if plain and isinstance(value, (list, dict, set)):
            copied = copy.deepcopy(value)
            # Of what has no equality of its own, no copy is equal.
            if _equal(value, copied):
                self.copies[name] = copied
        elif plain and not callable(value):
            own = getattr(value, "__dict__", {})
            literals = {field: held for field, held in own.items() if is_literal(held)}
            if literals:
                self.fields[name] = copy.deepcopy(literals)

    def __deepcopy__(self, memo: object) -> Original:
        return self

    def named(self, name: str) -> str:
        """An attribute, for messages."""
        return repr(f"{self.path}.{name}" if self.path else name)

    def change(self, name: str, value: object) -> Change | None:
        """The change of an attribute that the program rests on; None if the value is as planned."""
        planned = self.copies.get(name, self.read[name])
        if value is planned or (type(value) is type(planned) and _equal(value, planned)):
            return None
        was = "" if isinstance(planned, _Unkept) else f" as {planned!r}"
        words = f"{self.named(name)} was read{was} when the model was planned"
        change = Change(path=self.path, name=name, value=value, words=words)
        if isinstance(planned, _Unkept) or not is_literal(value):
            raise refused(change, "it is no plain value")
        return change

    def changed_fields(self, name: str) -> Iterator[Change]:
        """The changes of an object's fields, which a skeleton sees, as it shares the object."""
        present = vars(self.read[name])
        for field, planned in self.fields[name].items():
            value = present.get(field)
            if value is planned or _equal(value, planned):
                continue
            place = f"{name}.{field}"
            words = f"{self.named(place)} was {planned!r} when the model was planned"
            change = Change(path=self.path, name=place, value=value, words=words)
            if not is_literal(value):
                raise refused(change, "it is no plain value")
            yield change

    def value(self, name: str, owner: nn.Module) -> Any:
        """An attribute of the original: its own, its class's, or a property of the `owner`."""
        if name in self.attributes:
            return self.attributes[name]
        value = inspect.getattr_static(self.kind, name, None)
        if isinstance(value, property) and value.fget is not None:
            return value.fget(owner)
        if callable(value) or isinstance(value, (classmethod, staticmethod)):
            raise AttributeError(
                f"{name!r} is a method of {self.kind.__name__}, of which a planned module has "
                "only the call and the state"
            )
        if name not in dir(self.kind) or not is_plain(value):
            raise AttributeError(f"a planned {self.kind.__name__} has no attribute {name!r}")
        return value

    def names(self) -> list[str]:
        """The names that can be read."""
        names = list(self.attributes)
        for name in dir(self.kind):
            if name.startswith("_"):
                continue
            value = inspect.getattr_static(self.kind, name)
            if isinstance(value, property) or (not callable(value) and is_plain(value)):
                names.append(name)
        return names


class Recalling(OwnState):
    """A module that answers for plain attributes of an original, where there is one."""

    _original: Original | None = None
    # Of the whole module, by path and name; None where no program can follow.
    _changes: dict[tuple[str, str], Change] | None = None

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if self._original is None or name.startswith("_"):
                raise
        return self._original.value(name, self)

    def __setattr__(self, name: str, value: Any) -> None:
        if self._original is not None and value is not self._modules.get(name, self):
            self._note(self._original, name, value)
        super().__setattr__(name, value)

    def __delattr__(self, name: str) -> None:
        if self._original is not None:
            self._note(self._original, name, _Unkept())
        super().__delattr__(name)

    def _note(self, original: Original, name: str, value: object) -> None:
        """Note the change of an attribute that the program rests on, or refuse it."""
        if name not in original.read:
            return
        change = original.change(name, value)
        changes = self._changes
        if change is None:
            if changes is not None:
                changes.pop((original.path, name), None)
        elif changes is None:
            raise refused(change, "the model cannot be exported once more")
        # Containers are looked at in each call, since they may change in place, too.
        elif name not in original.copies:
            changes[original.path, name] = change

    def changed_containers(self) -> Iterator[Change]:
        """The changes of lists, dicts and sets that were read."""
        original = self._original
        for name in original.copies if original is not None else ():
            assert original is not None
            change = original.change(name, vars(self).get(name, original.read[name]))
            if change is not None:
                yield change

    def __dir__(self) -> list[str]:
        names = set(super().__dir__())  # type: ignore[no-untyped-call]
        if self._original is not None:
            names.update(self._original.names())
        return sorted(names)


class OriginalModule(Recalling):
    """A submodule of the original, which `isinstance` takes for one of the original's class."""

    # Scripts sort parameters and initialise modules by type. `type()` still tells this class.
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return OriginalModule if self._original is None else self._original.kind

    def forward(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: the plan is of the whole model."""
        name = self._original.kind.__name__ if self._original is not None else "submodule"
        raise PlanError(
            f"this {name} is part of a planned model and has no forward pass of its own: call the "
            "whole planned module"
        )

    def _no_hooks(self, *_: Any, **__: Any) -> NoReturn:
        """Refused: nothing would call them."""
        raise PlanError(
            "parts of a planned model are not called one by one, and hooks on them would never "
            "run: put them on the whole"
        )

    register_forward_hook = register_forward_pre_hook = _no_hooks
    register_full_backward_hook = register_full_backward_pre_hook = _no_hooks

    def _get_name(self) -> str:
        kind = type(self) if self._original is None else self._original.kind
        return kind.__name__


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
    nn.ModuleList: OriginalList,
    nn.Sequential: OriginalSequence,
    nn.ModuleDict: OriginalDict,
    nn.ParameterList: OriginalParameters,
    nn.ParameterDict: OriginalNamedParameters,
}
CONTAINERS = frozenset(_KINDS.values())


def recall(
    root: Recalling, module: nn.Module, reads: Mapping[str, frozenset[str]], path: str = ""
) -> None:
    """Give `root` the submodules of `module`, still without parameters, and plain attributes.

    `reads`: the attributes that the program rests on, by the submodule's path.
    """
    root._original = Original(module, path, reads)
    for name, child in module._modules.items():
        if child is None:
            root._modules[name] = None
        elif is_free(root, name):
            part = _part(child)
            root._modules[name] = part
            recall(part, child, reads, f"{path}.{name}" if path else name)


def follow(root: Recalling) -> None:
    """Let a module and its parts note changes that other programs may follow."""
    changes: dict[tuple[str, str], Change] = {}
    for part in root.modules():
        if isinstance(part, Recalling):
            part._changes = changes


def _part(module: nn.Module) -> OriginalModule:
    """An empty submodule of the kind that stands for a module's."""
    kinds = (ours for torchs, ours in _KINDS.items() if isinstance(module, torchs))
    part = next(kinds, OriginalModule)()
    # torch's containers of parameters count and name their members themselves.
    if isinstance(module, nn.ParameterList):
        vars(part)["_size"] = len(module)
    if isinstance(module, nn.ParameterDict):
        vars(part)["_keys"] = dict.fromkeys(module.keys())
    return part


def is_free(module: nn.Module, name: str) -> bool:
    """Whether a name is free in a module; its original's attributes do not count."""
    taken = (vars(module), module._parameters, module._buffers, module._modules)
    return (
        bool(name) and not any(name in held for held in taken) and not hasattr(type(module), name)
    )


def attach(
    root: nn.Module, path: str, value: Tensor, *, saved: bool = True
) -> tuple[nn.Module, str]:
    """Register a parameter or a buffer under its module path; `saved`: in the state dict.

    If the path is taken, by an attribute say, underscores take the place of dots.
    """
    *parents, leaf = path.split(".")
    module = root
    for part in parents:
        child = module._modules.get(part)
        if child is None:
            if not is_free(module, part):
                return attach(root, path.replace(".", "_"), value, saved=saved)
            child = Recalling()
            module.add_module(part, child)
        module = child
    if not is_free(module, leaf):
        other = (path.replace(".", "_") if parents else path) + "_"
        return attach(root, other, value, saved=saved)
    if isinstance(value, nn.Parameter):
        module.register_parameter(leaf, value)
    else:
        module.register_buffer(leaf, value, persistent=saved)
    return module, leaf


def held(module: nn.Module, leaf: str) -> Any:
    """The present value under a name, which may be another tensor than was registered."""
    # Every step reads every parameter several times: `getattr` looks in many places first.
    value = module._parameters.get(leaf)
    return getattr(module, leaf) if value is None else value


def _equal(value: object, other: object) -> bool:
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
