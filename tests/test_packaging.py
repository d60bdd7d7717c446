"""The house keeps its shape: packages, links, wheel, and imports that point only up the list of rooms."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import networkx as nx
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[1]
LINKED = ("costmodel", "search", "runtime")
# Room -> the rooms it may import beside itself.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "forking": set(),
    "limits": set(),
    "outputs": {"errors"},
    "printable": set(),
    "ir": set(),
    "sharding": {"errors", "ir"},
    "notations": {"errors", "sharding"},
    "frontends": {"errors", "forking", "ir", "limits", "model"},
    "order": {"errors", "ir", "sharding"},
    "costmodel": {"errors", "ir", "limits", "sharding", "order"},
    "search": set(),
    "convert": {"errors", "plan", "plan_checks", "plan_parts", "printable", "sharding"},
    "strategy_files": {"errors", "ir", "limits", "outputs", "plan", "plan_parts", "sharding"},
    "plan": {"autopar", "errors", "ir", "limits", "order", "outputs", "plan_parts", "sharding"},
    "plan_parts": {"errors", "ir", "limits", "order", "sharding"},
    "model": {"autopar", "errors", "ir"},
    "runtime": {"autopar", "errors", "forking", "ir", "limits", "model", "order", "sharding", "plan"},
}
# What the user touches may import everything; every other file (the planner and what it is made of) all but these and the runtime.
TOP = {
    "autopar", "api", "plan_options", "cli", "communication", "context", "plan_origin", "operators", "report", "importing", "supposing",
    "training", "torchrun", "verifying", "__main__",
}  # fmt: skip
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS: dict[str, str] = PYPROJECT["tool"]["setuptools"]["package-dir"]


def _modules() -> dict[str, Path]:
    """Every module of the project by its import name."""
    files = {}
    for package, folder in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            if package == "autopar" and parts[0] in LINKED:
                continue  # reached through a link: listed under its own folder
            files[".".join((package, *parts)).removesuffix(".__init__")] = path
    return files


MODULES = _modules()


def _typing_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _walk(node: ast.AST, *, typing: bool) -> Iterator[ast.AST]:
    """All nodes below `node`; without those that only type checkers see, unless `typing`."""
    for child in ast.iter_child_nodes(node):
        if typing or not _typing_only(child):
            yield child
            yield from _walk(child, typing=typing)


@functools.cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _imports(module: str, *, typing: bool = True) -> set[str]:
    """Absolute names of what `module` imports, each the longest name that is a module of the project, or as written."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in _walk(_tree(path), typing=typing):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join((*above, *([node.module] if node.module else [])))
            names = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else base for name in names}
    return found


def _room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _allowed(room: str) -> set[str]:
    """The rooms that `room` may import."""
    if room in ROOMS:
        return ROOMS[room]
    everything = {_room(name) for name in MODULES}
    return everything if room in TOP else everything - TOP - {"runtime"} | {"autopar"}


def test_listed_packages_are_the_folders_with_an_init() -> None:
    holding = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == holding


def test_the_versions_that_are_tested_are_those_that_are_allowed() -> None:
    """`make versions` takes Python from the classifiers and torch from constraints.txt."""
    project = PYPROJECT["project"]
    named = [match[1] for text in project["classifiers"] if (match := re.search(r"Python :: (3\.\d+)$", text))]
    pythons = SpecifierSet(project["requires-python"])
    assert named == [f"3.{minor}" for minor in range(8, 30) if f"3.{minor}" in pythons]
    pinned = re.search(r"^torch==(\d+\.\d+)\.\d+$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    for extra in ("torch", "test"):
        torch = next(found for found in map(Requirement, project["optional-dependencies"][extra]) if found.name == "torch")
        allowed = [f"2.{minor}" for minor in range(40) if torch.specifier.contains(f"2.{minor}.0")]
        assert pinned is not None and allowed == [pinned[1]]


@pytest.mark.parametrize("name", LINKED)
def test_links_are_relative(name: str) -> None:
    link = ROOT / "autopar" / name
    assert link.is_symlink()
    assert os.readlink(link) == f"../{name}"


def test_version_is_written_once() -> None:
    text = (ROOT / "autopar" / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    assert match is not None
    assert match[1] == PYPROJECT["project"]["version"]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_opens_with_a_docstring(module: str) -> None:
    assert ast.get_docstring(_tree(MODULES[module]))


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_up_the_list(module: str) -> None:
    room = _room(module)
    bare = {name for name in _imports(module) if name.split(".")[0] in LINKED}
    assert not bare, f"{module} imports {bare}: the folders are imported as parts of autopar"
    used = {_room(name) for name in _imports(module) if name.split(".")[0] == "autopar"}
    wrong = used - _allowed(room) - {room}
    assert not wrong, f"{module} ({room}) may not import {wrong}"


def test_no_file_imports_in_a_circle() -> None:
    edges = ((module, name) for module in MODULES for name in _imports(module, typing=False) & set(MODULES) - {module})
    graph = nx.DiGraph(edges)
    assert list(nx.simple_cycles(graph)) == []


def test_planning_needs_no_torch() -> None:
    """Every module outside the runtime and the torch frontend can be imported where torch cannot."""
    apart = ("autopar.runtime", "autopar.frontends.torch")
    names = sorted(name for name in MODULES if not name.startswith(apart) and not name.endswith("__main__"))
    program = "import sys\nsys.modules['torch'] = None\n" + "\n".join(f"import {name}" for name in names)
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_importing_autopar_is_cheap() -> None:
    program = "import sys, autopar\nassert not {'numpy', 'onnx', 'pydantic', 'torch', 'typer'} & set(sys.modules), sorted(sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.ci
def test_wheel_holds_each_real_file_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--wheel-dir", str(tmp_path), str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".py", ".json", "py.typed"))]
    presets = [f"autopar/{path.relative_to(ROOT)}" for path in (ROOT / "costmodel" / "presets").rglob("*.json")]
    modules = [name.replace(".", "/") + ("/__init__" * (path.name == "__init__.py")) + ".py" for name, path in MODULES.items()]
    constants = [f"autopar/costmodel/device/data/{path.name}" for path in (ROOT / "costmodel" / "device" / "data").glob("*.json")]
    assert sorted(held) == sorted([*modules, *presets, *constants, "autopar/py.typed"])
