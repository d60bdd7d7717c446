"""The configuration that a function of a Python file returns, and the choice of that function."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from autopar.errors import UsageError
from autopar.printable import printable

from .evaluation import returned
from .files import PythonFile
from .values import Record, Value

CHOSEN = "config"
"""The name that is given to choose one of several functions."""
_RESULT = re.compile(
    r"(?:^|\.)(?:Trainer\.Config|ConfigContainer|\w*Trainer\w*\.Config|\w*TrainerConfig)\W*$"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Configured:
    """A configuration by its fields; `function` made it, and `calls` may have set more of them."""

    record: Record
    function: str
    calls: tuple[str, ...]


def configured(
    path: Path, text: str, given: Mapping[str, str], closed: tuple[str, ...] = ()
) -> Configured:
    """The configuration of a file.

    `given`: the name of the function as "config" where there are several, and values of its
    arguments. `closed`: ends of the names of functions that are not followed. `UsageError` with the
    line for what does not show.
    """
    file = PythonFile.of(path, text)
    function = _chosen(file, given)
    values: dict[str, Value] = {
        name: Record(made=made, line=function.lineno, path=str(path))
        for name, made in _taken(function).items()
    }
    values |= {name: _read(value) for name, value in given.items()}
    record, notes = returned(file, function, values, closed)
    if not isinstance(record, Record):
        raise UsageError(
            f"{path}, line {function.lineno}: {function.name} returns no configuration that shows"
        )
    held = [record, *(value for value in record.fields.values() if isinstance(value, Record))]
    calls = [said for said, given_to in notes if any(one in held for one in given_to)]
    return Configured(record=record, function=function.name, calls=tuple(dict.fromkeys(calls)))


def _taken(function: ast.FunctionDef) -> dict[str, str]:
    """The configurations that a function takes to set fields in them, by its arguments."""
    kinds = {
        argument.arg: ast.unparse(argument.annotation).strip("'\"")
        for argument in function.args.args
        if argument.annotation is not None
    }
    return {name: kind for name, kind in kinds.items() if _RESULT.search(kind)}


def _chosen(file: PythonFile, given: Mapping[str, str]) -> ast.FunctionDef:
    functions = {
        name: function
        for name, function in file.functions.items()
        if not name.startswith("_")
        and function.returns is not None
        and _RESULT.search(ast.unparse(function.returns).strip("'\""))
    }
    # What sets fields in a configuration is called by what makes one, if that is there.
    makers = {name: one for name, one in functions.items() if not _taken(one)}
    functions = makers or functions
    wanted = given.get(CHOSEN)
    if wanted is not None and wanted in file.functions:
        return file.functions[wanted]
    elsewhere = file.elsewhere(wanted) if wanted is not None else None
    if elsewhere is not None and elsewhere[1] in elsewhere[0].functions:
        return elsewhere[0].functions[elsewhere[1]]
    if wanted is None and len(functions) == 1:
        return next(iter(functions.values()))
    lines = [f"{name} (line {function.lineno})" for name, function in functions.items()]
    shown = ", ".join(lines[:20]) + (f" and {len(lines) - 20} more" if len(lines) > 20 else "")
    said = f"it has no function {wanted!r}" if wanted is not None else "which of its functions"
    if not lines:
        said = "no function in it returns a configuration (Trainer.Config, ConfigContainer)"
    asked = f"; give --set {CHOSEN}=NAME, of {shown}" if lines else ""
    raise UsageError(printable(f"{file.path}: {said}{asked}", lines=False))


def _read(text: str) -> Value:
    """A given value: a number or a truth as such, else a text."""
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text
