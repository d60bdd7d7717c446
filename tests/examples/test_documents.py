"""The pages for those who come from elsewhere: every row shows a test that exists, and every name of ours is one."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

import autopar
from autopar.context.keys import KEYS, RENAMED
from autopar.notations import NOTATIONS
from autopar.schemes import scheme_named

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = (ROOT / "docs" / "from-the-documents.md").read_text(encoding="utf-8")
COMING = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The rows of all tables of a page, without their heads."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    lines = [number for number, row in enumerate(found) if set("".join(row)) <= set("-")]
    return [row for number, row in enumerate(found) if number not in lines and number + 1 not in lines]


@functools.cache
def names_in(path: str) -> set[str]:
    """The tests of a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")}


@pytest.mark.parametrize("row", rows(CLAIMS), ids=lambda row: row[0][:40])
def test_every_claim_is_shown_by_a_test(row: list[str]) -> None:
    claim, here, shown = row
    cited = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", shown)
    assert claim and here and cited, row
    for path, name in cited:
        assert (ROOT / path).exists(), path
        assert not name or name in names_in(path), f"{path} has no {name}"
    assert "planned" not in "".join(row).lower()


def test_every_document_and_every_system_has_its_table() -> None:
    assert len(re.findall(r"^## \d\. ", CLAIMS, re.MULTILINE)) == 5 and len(rows(CLAIMS)) > 80
    for system in ("MindSpore", "OneFlow", "Megatron-LM", "DeepSpeed", "Colossal-AI", "Alpa", "GSPMD", "DDP", "Horovod"):
        assert re.search(rf"^## .*{re.escape(system)}", COMING, re.MULTILINE), system


def test_every_key_is_on_both_pages() -> None:
    for key in KEYS:
        assert key in COMING, key
    for key in ("device_num", "global_rank", *RENAMED.values()):
        assert key in CLAIMS, key
    for name in NOTATIONS:
        assert name in COMING or name in ("autopar", "dtensor", "oneflow"), name


def test_names_of_ours_exist() -> None:
    for name in set(re.findall(r"`autopar\.(\w+)", COMING + CLAIMS)):
        if name not in ("notations",):
            assert hasattr(autopar, name), name
    for name in set(re.findall(r"`autopar\.communication\.(\w+)", COMING + CLAIMS)):
        assert hasattr(autopar.communication, name), name


def test_schemes_exist() -> None:
    for text in re.findall(r"schemes? ((?:`[\w.-]+`(?:, )?)+)", COMING + CLAIMS):
        for name in re.findall(r"`([\w.-]+)`", text):
            assert scheme_named(name), name
