"""Imports point only down: no circle, rooms in order, and folders small enough to be read."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import networkx as nx
import pytest

from tests.product_code import LINKED, MODULES, ROOT, imports

FOUNDATION = {"errors", "forking", "file_limits", "printable", "reading", "units"}
"""Single files that know nothing of the product beside its errors."""

# Room -> the rooms that it may import beside itself and the foundation. A room is the longest name
# of this table and the next that a module's name below `autopar` begins with, or else that name's
# first part; `autopar` is the package itself, which knows the version.
ROOMS: dict[str, set[str]] = {
    "errors": set(),
    "forking": set(),
    "file_limits": set(),
    "printable": set(),
    "reading": {"units"},
    "units": set(),
    "outputs": set(),
    "remembered": {"outputs", "reading"},
    "ir": set(),
    "facts": set(),
    "model": {"autopar", "facts", "ir"},
    "sharding": {"ir"},
    "torch_operators": set(),
    "frontends": {"facts", "ir", "model", "raising", "torch_operators"},
    "raising": {"ir"},
    "order": {"ir", "sharding"},
    "compiled": set(),
    "costmodel": {"compiled", "ir", "sharding", "order"},
    "search": {"compiled"},
    "plan_parts": {"ir", "order", "sharding"},
    "plan_matching": {"ir", "plan_parts", "sharding"},
    "plan": {
        "autopar",
        "ir",
        "order",
        "outputs",
        "plan_file",
        "plan_matching",
        "plan_parts",
        "sharding",
    },
    "runtime": {
        "autopar",
        "facts",
        "frontends",
        "ir",
        "model",
        "order",
        "plan",
        "plan_parts",
        "sharding",
        "torch_operators",
    },
    "integrations.notations": {"sharding"},
    "notations": {"integrations.notations"},
    "integrations.convert": {
        "costmodel",
        "ir",
        "order",
        "plan",
        "plan_checks",
        "plan_parts",
        "sharding",
    },
    "integrations.mindspore.strategy_files": {"ir", "outputs", "plan", "plan_parts", "sharding"},
}
STANDALONE = {"errors", "forking", "file_limits", "printable", "units", "ir", "compiled"}
"""Rooms that may import nothing, or only the errors."""
# What the user touches may import everything; every other file (the planner and what it is made of)
# all but these and the runtime.
TOP = {
    "autopar",
    "analysis",
    "api",
    "options",
    "cli",
    "communication",
    "plan_origin",
    "operators",
    "report",
    "interface",
    "integrations.communication",
    "integrations.gradient_formats",
    "integrations.importing",
    "integrations.mindspore.context",
    "integrations.oneflow",
    "training",
    "torchrun",
    "verifying",
    "__main__",
}

PLANNING_STEPS = (
    "model",
    "space",
    "tables",
    "solve",
    "stages",
    "programs",
    "bounds",
    "outer_search",
    "planner",
    "remembered_plans",
)
"""The folders of `autopar/planning` in the order of the data; imports run up this tuple only."""

LARGEST_FOLDER = 24
RULE_TABLES = "autopar.sharding.rules"
"""One file an operator family: a table, exempt from the size of folders."""

# What is known and to be mended; these two tables only shrink.
KNOWN_CIRCLES: tuple[set[str], ...] = ()
KNOWN_FOLDERS: dict[str, int] = {}


def _room(module: str) -> str:
    listed = [room for room in (*ROOMS, *TOP) if f"{module}.".startswith(f"autopar.{room}.")]
    if listed:
        return max(listed, key=len)
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _allowed(room: str) -> set[str]:
    if room in STANDALONE:
        return {"errors"}
    if room in ROOMS:
        return ROOMS[room] | FOUNDATION
    everything = {_room(name) for name in MODULES}
    return everything if room in TOP else everything - TOP - {"runtime"} | {"autopar"}


def _folder(module: str) -> str:
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_rooms_import_what_their_row_allows(module: str) -> None:
    room = _room(module)
    bare = {name for name in imports(module) if name.split(".")[0] in LINKED}
    assert not bare, f"{module} imports {bare}: the folders are imported as parts of autopar"
    used = {_room(name) for name in imports(module) if name.split(".")[0] == "autopar"}
    wrong = used - _allowed(room) - {room}
    assert not wrong, f"{module} ({room}) may not import {wrong}"


def test_no_file_imports_in_a_circle() -> None:
    """Imports inside functions count, and so do those that only type checkers see."""
    graph = nx.DiGraph(
        (module, name) for module in MODULES for name in imports(module) & set(MODULES) - {module}
    )
    circles = [names for names in nx.strongly_connected_components(graph) if len(names) > 1]
    new = [sorted(names) for names in circles if not any(names <= known for known in KNOWN_CIRCLES)]
    assert new == []


def test_planning_runs_down_the_list_of_its_steps() -> None:
    place = {step: position for position, step in enumerate(PLANNING_STEPS)}
    wrong = []
    for module in MODULES:
        if not module.startswith("autopar.planning."):
            continue
        step = module.split(".")[2]
        for name in imports(module):
            if not name.startswith("autopar.planning."):
                continue
            imported = name.split(".")[2]
            if place.get(imported, -1) > place.get(step, len(place)):
                wrong.append(f"{module} imports {name}")
    assert wrong == []


def test_analysis_lies_below_report_and_report_below_the_command_line() -> None:
    above = {"options": {"analysis", "report", "cli"}, "analysis": {"report", "cli"}}
    above["report"] = {"cli"}
    wrong = [
        f"{module} imports {name}"
        for module in MODULES
        for name in imports(module)
        if name.startswith("autopar.") and _room(name) in above.get(_room(module), set())
    ]
    assert wrong == []


def test_folders_can_be_read() -> None:
    files = Counter(map(_folder, MODULES))
    large = {
        folder: count
        for folder, count in files.items()
        if count > KNOWN_FOLDERS.get(folder, LARGEST_FOLDER) and folder != RULE_TABLES
    }
    assert large == {}


def test_planning_needs_no_torch() -> None:
    """Every module outside the rooms of PyTorch modules is imported without torch."""
    apart = (
        "autopar.runtime",
        "autopar.integrations.oneflow",
        "autopar.facts",
        "autopar.frontends.torch",
        "autopar.torch_operators",
    )
    names = sorted(
        name for name in MODULES if not name.startswith(apart) and not name.endswith("__main__")
    )
    program = "import sys\nsys.modules['torch'] = None\n" + "\n".join(
        f"import {name}" for name in names
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_importing_autopar_is_cheap() -> None:
    program = (
        "import sys, autopar\n"
        "heavy = {'numpy', 'onnx', 'pydantic', 'torch', 'typer'} & set(sys.modules)\n"
        "assert not heavy, sorted(heavy)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
