"""The search is used through what it exports: nobody outside imports one of its modules."""

import ast
from collections.abc import Iterator
from pathlib import Path

import autopar.search

ROOT = Path(__file__).parents[2]
ROOMS = ("autopar", "costmodel", "runtime", "benchmarks", "examples", "tests")
PACKAGE = "autopar.search"


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """The absolute imports of a file: module and name, an empty name for a module alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)


def outsiders() -> Iterator[Path]:
    """The files outside the search; its own tests, and those of its loops, may look inside."""
    own = (ROOT / "tests/search", ROOT / "tests/compiled")
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            if not any(map(path.is_relative_to, own)) and path.resolve() == path:
                yield path


def test_nobody_outside_imports_an_inner_module() -> None:
    """The doors are the exported names, so the inner modules may be laid anew at any time."""
    doors = set(autopar.search.__all__)
    wrong = [
        f"{path.relative_to(ROOT)}: {module}.{name}"
        for path in outsiders()
        for module, name in imports(path)
        if module.startswith(PACKAGE + ".") or (module == PACKAGE and name not in doors)
    ]
    assert not wrong
