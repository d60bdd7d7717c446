"""The attributes of a module that its forward pass reads while it is exported.

An exported program rests on their values: numbers become constants, and flags choose branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

_MODULES_OWN = frozenset(vars(torch.nn.Module())) | frozenset(dir(torch.nn.Module))
"""Names that torch's machinery reads of every module."""
_TOLD = frozenset({"forward", "training"})
"""Those of them that tell something about a module's own code."""


@contextmanager
def recorded_reads(module: torch.nn.Module) -> Iterator[dict[str, set[str]]]:
    """Record the attributes that are read of the module and its submodules."""
    # While it exports, torch reads a module through an object that shares the module's `__dict__`.
    paths = {id(vars(part)): path for path, part in module.named_modules()}
    reads: dict[str, set[str]] = {path: set() for path in paths.values()}

    def read(part: torch.nn.Module, name: str) -> Any:
        if not name.startswith("__"):
            path = paths.get(id(object.__getattribute__(part, "__dict__")))
            if path is not None:
                reads[path].add(name)
        return object.__getattribute__(part, name)

    # The class of all modules has no such method of its own, so that it can be taken away again.
    assert "__getattribute__" not in vars(torch.nn.Module)
    torch.nn.Module.__getattribute__ = read  # type: ignore[method-assign,assignment]
    try:
        yield reads
    finally:
        del torch.nn.Module.__getattribute__


def of_its_code(reads: Mapping[str, set[str]]) -> dict[str, frozenset[str]]:
    """The reads of the modules' own code, by path, without modules that it does not read."""
    own = {path: frozenset(names - (_MODULES_OWN - _TOLD)) for path, names in reads.items()}
    return {path: names for path, names in own.items() if names}


def all_that_can_be_read(module: torch.nn.Module) -> dict[str, frozenset[str]]:
    """The attributes of all parts, for an export that could not be watched."""
    return {
        path: frozenset({*vars(part), *part._modules} - _MODULES_OWN | _TOLD)
        for path, part in module.named_modules()
    }
