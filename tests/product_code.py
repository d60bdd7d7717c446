"""The modules of the product as tests look at them: files, syntax trees, and what each imports."""

from __future__ import annotations

import ast
import functools
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("costmodel", "search", "runtime")
"""Folders at the top of the repository that are imported as parts of `autopar`."""
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]


def _modules() -> dict[str, Path]:
    files = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if package == "autopar" and parts[0] in LINKED:
                continue  # reached through a link: listed under its own folder
            files[".".join((package, *parts)).removesuffix(".__init__")] = path
    return files


MODULES = _modules()
"""Every module of the product by its import name."""


@functools.cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text(encoding="utf-8"))


def _import_statements(node: ast.AST, *, lazy: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif lazy or not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _import_statements(child, lazy=lazy)


def imports(module: str, *, lazy: bool = True) -> set[str]:
    """Absolute names of what `module` imports.

    Each is the longest name that is a module of the product, or else the name as written.
    Imports that only type checkers see are counted. `lazy`: so are imports inside functions.
    """
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    names: set[str] = set()
    for node in _import_statements(tree(path), lazy=lazy):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
            continue
        above = package[: len(package) + 1 - node.level] if node.level else []
        base = ".".join((*above, *([node.module] if node.module else [])))
        for alias in node.names:
            name = f"{base}.{alias.name}"
            names.add(name if name in MODULES else base)
    return names
