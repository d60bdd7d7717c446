"""Plain attributes of an original module, and those of them on which a program rests."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from autopar.facts import GONE, Fact, FactsOf, are_equal, is_literal, is_plain

from .changes import Change, refused

_OWN = frozenset(vars(nn.Module()))
"""Attributes that every module has of its own."""


class Original:
    """The plain attributes of a module, and its class; copies share it.

    `path`: of the module in the whole. `read`: the values of the attributes that the program rests
    on, by name, copies of those that can change in place; `GONE` where one leads to a tensor or a
    module. `kept`: what those are that hold more than numbers and texts.
    """

    def __init__(self, module: nn.Module, path: str, reads: Mapping[str, frozenset[str]]) -> None:
        self.kind = type(module)
        self.path = path
        self.read: dict[str, Any] = {}
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
        self.read[name] = value if plain else GONE

    def __deepcopy__(self, memo: object) -> Original:
        return self

    def named(self, name: str) -> str:
        """An attribute, for messages."""
        return f"{self.path}.{name}" if self.path else name

    def entries(self, part: nn.Module) -> Iterator[Entry]:
        """How the attributes that the program rests on are looked at in a module of the plan."""
        for name, planned in self.read.items():
            if name in part._modules:
                yield Entry(self, name, part._modules, part._modules[name], None)
            elif is_literal(planned) and planned is not GONE:
                yield Entry(self, name, vars(part), planned, copy.deepcopy(planned))
            else:
                yield Entry(self, name, vars(part), planned, None)

    def facts(self, find: FactsOf) -> Iterator[Fact]:
        """The facts of objects among the attributes."""
        for name, value in self.read.items():
            if not callable(value) and not is_literal(value):
                yield from find.of(value, (), self.named(name), name, find.names.get(name, ""))

    def value(self, name: str, owner: nn.Module) -> Any:
        """An attribute of the original or its class, a property, or a method of torch's layers."""
        if name in self.attributes:
            return self.attributes[name]
        value = inspect.getattr_static(self.kind, name, None)
        if isinstance(value, property) and value.fget is not None:
            return value.fget(owner)
        if self.path and inspect.isfunction(value) and self.kind.__module__.startswith("torch.nn."):
            # Torch's own layers have none that call what a planned part cannot.
            return MethodType(value, owner)
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


@dataclass(frozen=True, slots=True)
class Entry:
    """An attribute that a program rests on: in `held` under its name, or else as `planned`.

    `copied`: a copy of a value that may change in place; None where it is told by its identity.
    """

    original: Original
    name: str
    held: dict[str, Any]
    planned: Any
    copied: Any

    def changed(self) -> Change | None:
        """The change of the attribute, if it is not as planned."""
        as_it_was = GONE if isinstance(self.planned, nn.Module) else self.planned
        value = self.held.get(self.name, as_it_was)
        wanted = self.planned if self.copied is None else self.copied
        if value is wanted or (type(value) is type(wanted) and are_equal(value, wanted)):
            return None
        original = self.original
        was = "" if self.copied is None else f" as {wanted!r}"
        words = f"{original.named(self.name)!r} was read{was} when the model was planned"
        change = Change(path=original.path, name=self.name, value=value, words=words)
        if self.planned is GONE or not is_literal(value):
            raise refused(change, "it is no plain value")
        return change
