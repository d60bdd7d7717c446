"""Names in the documents exist: paths of the repository and dotted names of `autopar`."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from autopar.sharding.rules import RULES
from tests.product_code import ROOT

PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
]
FOLDERS = ("autopar", "benchmarks", "costmodel", "docs", "examples", "runtime", "search", "tests")
# Files that a reader writes or gets, named in the documents beside those of the repository.
READERS_FILES = {"net.py", "train.py"}

_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
KINDS = {kind for kind in RULES if kind.startswith("autopar.")}
"""Operators of graphs that no framework has."""
_SPAN = re.compile(r"`([^`\n]+)`")
_PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/?")
_DOTTED = re.compile(r"autopar(?:\.[A-Za-z_]\w*)+(?!\w*/)")
# `autopar.x` stands for any name; the others are files.
NO_NAMES = {"autopar.x", "autopar.toml"}


def _spans(page: Path) -> Iterator[str]:
    """Texts between single back-ticks, outside of blocks of code."""
    yield from _SPAN.findall(_FENCE.sub("", page.read_text(encoding="utf-8")))


def _known_paths() -> set[str]:
    """Files and folders of the repository with all their endings: `a/b/c.py`, `b/c.py`, `c.py`."""
    known: set[str] = set()
    for folder in FOLDERS:
        for path in (ROOT / folder, *(ROOT / folder).rglob("*")):
            if "__pycache__" not in path.parts:
                parts = path.relative_to(ROOT).parts
                known |= {"/".join(parts[start:]) for start in range(len(parts))}
    return known | {path.name for path in ROOT.iterdir() if not path.name.startswith(".")}


KNOWN = _known_paths()


def _is_path(text: str) -> bool:
    """Whether a text names a file or a folder of the repository, not one of the reader's."""
    if not _PATH.fullmatch(text) or text in READERS_FILES:
        return False
    if text.endswith((".py", "/")):
        return True
    return "/" in text and text.split("/")[0] in FOLDERS


def _exists(text: str) -> bool:
    if "*" in text:
        return any(ROOT.glob(text))
    return text.rstrip("/") in KNOWN


def _resolves(name: str) -> bool:
    """Whether a dotted name is a module, or an attribute of the longest module in it."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for attribute in parts[length:]:
            if not hasattr(value, attribute):
                break
            value = getattr(value, attribute)
        else:
            return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_paths_in_the_documents_exist(page: Path) -> None:
    gone = {text for text in _spans(page) if _is_path(text) and not _exists(text)}
    assert gone == set(), f"{page.name} names files that are not there"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_dotted_names_in_the_documents_exist(page: Path) -> None:
    names = {name for text in _spans(page) for name in _DOTTED.findall(text)}
    gone = {name for name in names - NO_NAMES - KINDS if not _resolves(name)}
    assert gone == set(), f"{page.name} names what cannot be imported"
