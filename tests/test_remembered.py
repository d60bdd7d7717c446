"""Answers on disk: recalled as they were, bounded, and never needed."""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import pytest

from autopar import remembered
from autopar.remembered import FILE_BYTES, FOLDER, TEXT_BYTES, key_of, recalled, remember, source_of


@pytest.fixture(name="folder")
def folder_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "answers"
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def test_a_text_is_recalled(folder: Path) -> None:
    assert recalled("a") is None
    remember("a", "ä\n")
    assert recalled("a") == "ä\n"
    (folder / "a.txt.z").unlink()
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
        os.utime(folder / f"{key}.txt.z", (age, age))
    remember("d", "d")
    assert sorted(path.name for path in folder.iterdir()) == ["c.txt.z", "d.txt.z"]


def test_what_is_too_large_or_cannot_be_written_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember("a", "x" * (TEXT_BYTES + 1))
    remember("a", "".join(map(chr, random.Random(0).choices(range(32, 127), k=2 * FILE_BYTES))))
    assert not folder.exists()
    folder.write_text("no folder")
    remember("a", "x")
    assert recalled("a") is None
    monkeypatch.setenv(FOLDER, "")
    remember("a", "x")
    assert recalled("a") is None


def test_a_link_to_a_pipe_is_no_answer(folder: Path) -> None:
    remember("a", "x")
    (folder / "a.txt.z").unlink()
    os.mkfifo(folder / "a.txt.z")
    assert recalled("a") is None


@pytest.mark.parametrize(
    "stored",
    [b"x", zlib.compress(b"text")[:-1], zlib.compress(b"\xff"), zlib.compress(bytes(2**27))],
    ids=["not compressed", "cut", "no text", "too large when it is decompressed"],
)
def test_other_files_are_no_answers(folder: Path, stored: bytes) -> None:
    remember("a", "x")
    (folder / "a.txt.z").write_bytes(stored)
    assert recalled("a") is None


def test_the_code_of_rooms_is_found() -> None:
    code = list(source_of("ir", "remembered.py"))
    assert any(b"class Graph" in part for part in code)
    assert b"def source_of" in code[-1]
