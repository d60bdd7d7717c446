"""Functions of Python itself, and of `dataclasses`, that configurations call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .values import Record, Unread, Value

BUILT_IN = frozenset(
    {"fields", "getattr", "hasattr", "int", "isinstance", "len", "range", "replace"}
)
LONGEST = 1_000
"""Most numbers of a range."""


def built_in(
    name: str, arguments: Sequence[Value], named: Mapping[str, Value], unread: Unread
) -> Value:
    """The value of a call; `unread` where it does not show."""
    match name, arguments:
        case "isinstance", [None | bool() | int() | float() | str() as value, Unread(text=kind)]:
            return type(value).__name__ == kind
        case "isinstance", [Record(), Unread(text="str" | "int" | "bool" | "float")]:
            return False
        case "hasattr", [Record() as owner, str() as attribute] if attribute in owner.fields:
            return True
        case "getattr", [Record() as owner, str() as attribute, *_] if attribute in owner.fields:
            return owner.fields[attribute]
        case "range", [int() as count] if 0 <= count <= LONGEST:
            return list(range(count))
        case "int", [int() as count]:
            return count
        case "len", [list() | tuple() | dict() as held]:
            return len(held)
        case "replace", [Record() as owner]:
            return replace(owner, fields={**owner.fields, **named})
        case "fields", [Record() as owner] if not owner.hides:
            return [
                Record(made="field", line=owner.line, path=owner.path, fields={"name": field})
                for field in owner.fields
            ]
    return unread
