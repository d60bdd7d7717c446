"""Python files by their functions, constants and imports; imported files beside them are read too.

Nothing is imported: a module is looked for in the folders above the file, by its dotted name.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from pathlib import Path

from autopar.errors import UsageError
from autopar.file_limits import CONFIGURATION_BYTES
from autopar.printable import printable
from autopar.reading import read_text


def parsed(path: Path, text: str) -> ast.Module:
    """The tree of a text; `UsageError` with the line for what is no Python."""
    try:
        return ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = getattr(error, "lineno", None) or 1
        said = getattr(error, "msg", None) or type(error).__name__
        raise UsageError(
            printable(f"{path}, line {line}: not Python: {said}", lines=False)
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Imported:
    """A name of another module: `name` of `module`, as `from module import name` says."""

    module: str
    level: int
    name: str


@dataclass(slots=True, kw_only=True)
class PythonFile:
    """A file by name: its `functions`, the expressions of its `constants`, and its `imports`.

    `beside`: modules that were looked for, by name and level; None where there is no such file.
    """

    path: Path
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    imports: dict[str, Imported] = field(default_factory=dict)
    beside: dict[tuple[str, int], PythonFile | None] = field(default_factory=dict)

    @classmethod
    def of(cls, path: Path, text: str) -> PythonFile:
        """The file of a text; `UsageError` with the line for what is no Python."""
        made = cls(path=path)
        for node in parsed(path, text).body:
            made._take(node)
        return made

    def elsewhere(self, name: str) -> tuple[PythonFile, str] | None:
        """The file, and the name there, that an imported name is of; None where it is not read."""
        imported = self.imports.get(name)
        if imported is None:
            return None
        file = self._module(imported.module, imported.level)
        return None if file is None else (file, imported.name)

    def _take(self, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef():
                self.functions[node.name] = node
            case ast.Assign(targets=[ast.Name(id=name)]):
                self.constants[name] = node.value
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                self.constants[name] = value
            case ast.ImportFrom():
                for alias in node.names:
                    self.imports[alias.asname or alias.name] = Imported(
                        module=node.module or "", level=node.level, name=alias.name
                    )

    def _module(self, name: str, level: int) -> PythonFile | None:
        key = (name, level)
        if key not in self.beside:
            self.beside[key] = None
            path = _path(self.path.absolute(), name.split(".") if name else [], level)
            if path is not None:
                text = read_text(path, CONFIGURATION_BYTES, what="Python file", error=UsageError)
                self.beside[key] = PythonFile.of(path, text)
        return self.beside[key]


def _path(beside: Path, parts: list[str], level: int) -> Path | None:
    """The file of a module that the file `beside` names, relative by `level` dots."""
    if level:
        roots = [beside.parents[level - 1]] if level <= len(beside.parents) else []
    else:
        roots = list(beside.parents)
    for root in roots:
        at = root.joinpath(*parts)
        for path in (at.with_name(f"{at.name}.py"), at / "__init__.py"):
            if path.is_file() and (parts or path.name == "__init__.py"):
                return path
    return None
