"""The package holds what it lists: versions, links, and a wheel with each real file once."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from tests.product_code import LINKED, MODULES, PYPROJECT, ROOT


def test_listed_packages_are_the_folders_with_an_init() -> None:
    holding = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == holding


def test_the_versions_that_are_tested_are_those_that_are_allowed() -> None:
    """`make versions` takes Python from the classifiers and torch from constraints.txt."""
    project = PYPROJECT["project"]
    named = [
        match[1]
        for text in project["classifiers"]
        if (match := re.search(r"Python :: (3\.\d+)$", text))
    ]
    pythons = SpecifierSet(project["requires-python"])
    assert named == [f"3.{minor}" for minor in range(8, 30) if f"3.{minor}" in pythons]
    pinned = re.search(
        r"^torch==(\d+\.\d+)\.\d+$",
        (ROOT / "constraints.txt").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    for extra in ("torch", "test"):
        torch = next(
            result
            for result in map(Requirement, project["optional-dependencies"][extra])
            if result.name == "torch"
        )
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


@pytest.mark.slow
@pytest.mark.ci
def test_wheel_holds_each_real_file_once(tmp_path: Path) -> None:
    source = tmp_path / "source"
    ignore = shutil.ignore_patterns(".*", "build", "__pycache__", "*.egg-info")
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*pip, "--wheel-dir", str(tmp_path), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    held = [
        name
        for name in zipfile.ZipFile(wheel).namelist()
        if name.endswith((".py", ".json", "py.typed"))
    ]
    presets = [
        f"autopar/{path.relative_to(ROOT)}"
        for path in (ROOT / "costmodel" / "presets").rglob("*.json")
    ]
    modules = [
        name.replace(".", "/") + ("/__init__" * (path.name == "__init__.py")) + ".py"
        for name, path in MODULES.items()
    ]
    constants = [
        f"autopar/costmodel/device/data/{path.name}"
        for path in (ROOT / "costmodel" / "device" / "data").glob("*.json")
    ]
    assert sorted(held) == sorted([*modules, *presets, *constants, "autopar/py.typed"])
