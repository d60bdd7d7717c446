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
from packaging.version import Version

from tests.product_code import LINKED, MODULES, PYPROJECT, ROOT


def test_listed_packages_are_the_folders_with_an_init() -> None:
    holding = {name for name, path in MODULES.items() if path.name == "__init__.py"}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == holding


def test_the_versions_that_are_tried_are_the_oldest_the_pinned_and_newer_ones() -> None:
    """No newer Python or torch is forbidden; the Makefile names the pairs that `versions` tries."""
    project = PYPROJECT["project"]
    named = [
        match[1]
        for text in project["classifiers"]
        if (match := re.search(r"Python :: (3\.\d+)$", text))
    ]
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    line = re.search(r"^VERSIONS \?= (.*)$", makefile, re.MULTILINE)
    assert line is not None
    pairs = [pair.split(":") for pair in line[1].split()]
    assert sorted({python for python, _ in pairs}) == named
    assert project["requires-python"] == f">={named[0]}"
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torches = [Version(torch) for _, torch in pairs]
    assert f"torch=={torches[1]}\n" in constraints and torches == sorted(torches)
    for extra in ("torch", "test"):
        requirements = map(Requirement, project["optional-dependencies"][extra])
        (torch,) = (wanted for wanted in requirements if wanted.name == "torch")
        assert str(torch.specifier) == f">={torches[0].major}.{torches[0].minor}"


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
