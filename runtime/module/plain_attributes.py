"""Plain attributes of an original module, and those of them on which a program rests."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from .changes import Change, is_literal, refused
from .plain_values import are_equal, is_plain

_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has of its own."""


class Unkept:
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
        self.read[name] = value if plain else Unkept()
        if plain and isinstance(value, (list, dict, set)):
            copied = copy.deepcopy(value)
            # Of what has no equality of its own, no copy is equal.
            if are_equal(value, copied):
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
        if value is planned or (type(value) is type(planned) and are_equal(value, planned)):
            return None
        was = "" if isinstance(planned, Unkept) else f" as {planned!r}"
        words = f"{self.named(name)} was read{was} when the model was planned"
        change = Change(path=self.path, name=name, value=value, words=words)
        if isinstance(planned, Unkept) or not is_literal(value):
            raise refused(change, "it is no plain value")
        return change

    def changed_fields(self, name: str) -> Iterator[Change]:
        """The changes of an object's fields, which a skeleton sees, as it shares the object."""
        present = vars(self.read[name])
        for field, planned in self.fields[name].items():
            value = present.get(field)
            if value is planned or are_equal(value, planned):
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
