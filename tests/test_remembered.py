"""Answers on disk: recalled as they were, bounded, and never needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from autopar import remembered
from autopar.remembered import FOLDER, TEXT_BYTES, key_of, recalled, remember


@pytest.fixture(name="folder")
def folder_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "answers"
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def test_a_text_is_recalled(folder: Path) -> None:
    assert recalled("a") is None
    remember("a", "ä\n")
    assert recalled("a") == "ä\n"
    (folder / "a.txt").unlink()
    assert recalled("a") is None


def test_a_key_depends_on_parts_and_versions() -> None:
    keys = [
        key_of(("a", b"b"), ("numpy",)),
        key_of(("ab", b""), ("numpy",)),
        key_of(("a", b"b"), ("torch",)),
        key_of(("a", b"b"), ("no-such-package",)),
    ]
    assert len(set(keys)) == 4
    assert keys[0] == key_of((b"a", "b"), ("numpy",))


def test_the_oldest_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "TEXTS", 2)
    for age, key in enumerate("abc"):
        remember(key, key)
        os.utime(folder / f"{key}.txt", (age, age))
    remember("d", "d")
    assert sorted(path.name for path in folder.iterdir()) == ["c.txt", "d.txt"]


def test_what_is_too_large_or_cannot_be_written_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember("a", "x" * (TEXT_BYTES + 1))
    assert not folder.exists()
    folder.write_text("no folder")
    remember("a", "x")
    assert recalled("a") is None
    monkeypatch.setenv(FOLDER, "")
    remember("a", "x")
    assert recalled("a") is None


def test_a_link_to_a_pipe_is_no_answer(folder: Path) -> None:
    remember("a", "x")
    (folder / "a.txt").unlink()
    os.mkfifo(folder / "a.txt")
    assert recalled("a") is None
