"""Checks of the Python interface's arguments: whole numbers, and memory with a unit."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from ..errors import UsageError
from .units import parse_bytes

WHOLE = ("devices", "batch", "stages", "micro_batches", "zero", "interleave")


def checked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with `memory` in bytes; `UsageError` for a count that is no whole number.

    >>> checked({"devices": 8, "memory": "2KiB"})
    {'devices': 8, 'memory': 2048.0}
    """
    found = dict(given)
    for name in WHOLE:
        value = given.get(name)
        try:
            if value is not None:
                found[name] = operator.index(value)
        except TypeError as error:
            hint = f": write {name}={value}" if isinstance(value, str) and value.isdecimal() else ""
            raise UsageError(f"{name} is {value!r}, {_article(value)}; it must be a whole number{hint}") from error
    memory = given.get("memory")
    if isinstance(memory, str):
        found["memory"] = parse_bytes(memory, "memory")
    elif memory is not None and not isinstance(memory, (int, float)):
        raise UsageError(f"memory is {memory!r}, {_article(memory)}; it must be a number of bytes, or a text such as '80GiB'")
    return found


def _article(value: object) -> str:
    name = type(value).__name__
    return {"str": "a text", "float": "a fraction", "list": "a list", "tuple": "a tuple"}.get(name, f"of type {name}")
