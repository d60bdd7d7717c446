"""The values of a configuration's Python file that is read, and not run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from autopar.printable import printable


@dataclass(slots=True, kw_only=True, eq=False)
class Record:
    """An object by the fields that the file sets in it.

    `made`: the call or the expression that it comes from; its other fields are what that gives
    them. `line`: of the file `path`. `arguments`: of the call, in order. `hides`: whether there are
    fields that do not show. Two records are the same if they are one object.
    """

    made: str
    line: int
    path: str = ""
    fields: dict[str, Value] = field(default_factory=dict)
    arguments: tuple[Value, ...] = ()
    hides: bool = False

    @property
    def name(self) -> str:
        """The last name of the call, such as `bf16_mixed`, without a closing `.Config`."""
        return self.made.removesuffix(".Config").rpartition(".")[2]

    @property
    def is_made(self) -> bool:
        """Whether a class has made it, as its capital says."""
        return self.made.rpartition(".")[2].lstrip("_")[:1].isupper()

    def record(self, name: str) -> Record:
        """A field that is an object; an empty one where nothing is set in it."""
        value = self.fields.get(name)
        return value if isinstance(value, Record) else Record(made=name, line=self.line)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unread:
    """A value that does not show: an expression of `text` at a line of the file `path`."""

    text: str
    line: int
    path: str = ""


Plain: TypeAlias = bool | int | float | str | None
Value: TypeAlias = "Plain | list[Value] | tuple[Value, ...] | dict[Value, Value] | Record | Unread"


def is_plain(value: object) -> bool:
    """Whether a value shows as a whole."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(is_plain(key) and is_plain(one) for key, one in value.items())
    return not isinstance(value, (Record, Unread))


def named_unread(source: str, name: str, value: Value) -> str:
    """The sentence on a field whose value does not show, with its line."""
    if isinstance(value, Unread):
        said = f"{value.path}, line {value.line}: {name} is {value.text}, which is not read"
    elif isinstance(value, Record):
        said = f"{value.path}, line {value.line}: {name} is {value.made}(...), which is not read"
    else:
        said = f"{name} is {value!r}"
    return printable(f"{source}: {said}", lines=False)
