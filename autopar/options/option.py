"""An option of planning: one row of the table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .kinds import TEXT, Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option of planning.

    `name`: in Python and in the request. `flag`: on the command line, if it is not the name with
    dashes; "" for an option of Python alone. `older`: its spellings of before. `help`: its text
    on the command line. `told`: its text in Python, "" for an option of the command line alone.
    """

    name: str
    flag: str | None = None
    older: tuple[str, ...] = ()
    kind: Kind = TEXT
    default: Any = None
    choices: tuple[Any, ...] | None = None
    metavar: str | None = None
    help: str = ""
    told: str = ""

    @property
    def spelled(self) -> str:
        """The spelling on the command line; "" if it has none."""
        return f"--{self.name.replace('_', '-')}" if self.flag is None else self.flag
