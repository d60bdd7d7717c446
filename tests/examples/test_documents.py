"""The pages for those who come from elsewhere: every row shows a test that exists, and every name
of ours is one.
"""

from __future__ import annotations

import argparse
import ast
import functools
import inspect
import re
from pathlib import Path

import pytest

import autopar
from autopar.cli.parser import build_parser
from autopar.integrations.mindspore.context.keys import KEYS, RENAMED
from autopar.integrations.notations import NOTATIONS
from autopar.schemes import scheme_named

ROOT = Path(__file__).resolve().parents[2]
CLAIMS = (ROOT / "docs" / "from-the-documents.md").read_text(encoding="utf-8")
COMING = (ROOT / "docs" / "coming-from.md").read_text(encoding="utf-8")


def rows(text: str) -> list[list[str]]:
    """The rows of all tables of a page, without their heads."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("|")
    ]
    lines = [number for number, row in enumerate(cells) if set("".join(row)) <= set("-")]
    return [
        row for number, row in enumerate(cells) if number not in lines and number + 1 not in lines
    ]


@functools.cache
def marks_of_tests(path: str) -> dict[str, set[str]]:
    """The tests of a file, each with the marks that it has as a whole."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    tests = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    ]
    return {
        test.name: {ast.unparse(mark).removeprefix("pytest.mark.") for mark in test.decorator_list}
        for test in tests
    }


@pytest.mark.parametrize("row", rows(CLAIMS), ids=lambda row: row[0][:40])
def test_every_claim_is_shown_by_a_test(row: list[str]) -> None:
    claim, here, shown = row
    cited = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", shown)
    assert claim and here and cited and len(cited) == shown.count("`") // 2, row
    for path, name in cited:
        assert (ROOT / path).exists(), path
        assert name in marks_of_tests(path), f"{path} has no {name}"
        marks = marks_of_tests(path)[name]
        assert "slow" not in marks or "ci" in marks, (
            f"{path}::{name} is slow, and not run for every change"
        )
    assert "planned" not in "".join(row).lower()


def test_files_and_options_of_the_page_are_there() -> None:
    for path in re.findall(
        r"`((?:autopar|costmodel|runtime|examples|docs|tests)/[\w./-]*)`", CLAIMS
    ):
        assert (ROOT / path).exists(), path
    parser = build_parser()
    (commands,) = (
        action for action in parser._actions if isinstance(action, argparse._SubParsersAction)
    )
    flags = set(commands.choices["plan"]._option_string_actions)
    actual = set(re.findall(r"`(--[\w-]+)", CLAIMS + COMING.split("## Megatron")[0]))
    assert actual and actual <= flags, actual - flags
    named = set(re.findall(r"`(\w+)=", CLAIMS))
    assert named and named <= {*KEYS, *inspect.signature(autopar.plan).parameters}, named


def test_every_document_and_every_system_has_its_table() -> None:
    assert len(re.findall(r"^## \d\. ", CLAIMS, re.MULTILINE)) == 5 and len(rows(CLAIMS)) > 80
    for system in (
        "MindSpore",
        "OneFlow",
        "Megatron-LM",
        "DeepSpeed",
        "Colossal-AI",
        "Alpa",
        "GSPMD",
        "DDP",
        "Horovod",
    ):
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
