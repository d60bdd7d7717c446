"""The documents: every block of commands, files and Python in the tutorial and the how-tos is
executed, every link leads somewhere.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from autopar.cli import run

ROOT = Path(__file__).resolve().parents[1]
DOCS = sorted((ROOT / "docs").glob("*.md"))
EXECUTED = ("tutorial.md", "how-to.md")
_BLOCK = re.compile(r"^(?:<!-- file: (\S+) -->\n)?```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#([\w-]+))?\)")


@pytest.mark.slow
@pytest.mark.ci
@pytest.mark.parametrize("name", EXECUTED)
def test_blocks_are_executed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    blocks = _BLOCK.findall((ROOT / "docs" / name).read_text(encoding="utf-8"))
    if name == "how-to.md":
        blocks = [
            *_BLOCK.findall((ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8"))[1:2],
            *blocks,
        ]
    scope: dict[str, Any] = {}
    executed = 0
    for file, language, text in blocks:
        if file:
            Path(file).write_text(text)
        elif language == "sh":
            for line in filter(None, text.splitlines()):
                words = shlex.split(line, comments=True)
                assert words[0] == "autopar"
                assert not run(words[1:]), line
                executed += 1
        elif language == "python":
            exec(text, scope)
        else:
            assert language in ("text", "toml")
    for module in ("net", "theirs"):
        sys.modules.pop(module, None)
    assert executed >= 3


def test_fences_name_a_language_alone() -> None:
    """With more words behind it the site shows the fence and its code as running text."""
    for path in DOCS:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert [line for line in lines if re.match(r"\s*```\S*\s+\S", line)] == [], path.name


@pytest.mark.parametrize(
    "path", [*DOCS, ROOT / "README.md", ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name
)
def test_links_lead_somewhere(path: Path) -> None:
    for target, anchor in _LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        actual = path.parent / target
        assert actual.exists(), f"{path.name} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", actual.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w -]", "", h).strip().lower().replace(" ", "-") for h in headings
            }, f"{path.name}: #{anchor}"


def test_the_readme_is_a_page() -> None:
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    assert lines[2].strip().startswith("make demo") and lines[3].strip().startswith("make test")
    assert (
        any("docs/report.png" in line for line in lines[:15])
        and os.path.getsize(ROOT / "docs" / "report.png") < 200_000
    )


def test_limits_are_told() -> None:
    """Every limit stands in the documents with its value, or as people write it."""
    text = (ROOT / "docs" / "hostile-input.md").read_text(encoding="utf-8")
    sizes = ("256 MiB", "1 MiB", "4 MiB", "64 MiB", "512 MiB", "100 MB", "2 GiB", "2^60")
    for words in (*sizes, "200,000", "1,048,576", "1,000,000", "65,536"):
        assert words in text, words
