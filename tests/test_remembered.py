"""Answers on disk: recalled as they were, bounded, and never needed."""

from __future__ import annotations

import multiprocessing
import os
import random
import zlib
from pathlib import Path

import pytest

from autopar import remembered
from autopar.errors import UsageError
from autopar.outputs import write_whole
from autopar.remembered import (
    FOLDER,
    TEXT_BYTES,
    Answers,
    answers,
    forget_all,
    key_of,
    recalled,
    remember,
    remembering_nothing,
    source_of,
)

A, B, C, D = (key_of("word", (letter,), ()) for letter in "abcd")


@pytest.fixture(name="folder")
def folder_of_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "answers"
    monkeypatch.setenv(FOLDER, str(folder))
    return folder


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_text_is_recalled(folder: Path) -> None:
    assert recalled(A) is None
    remember(A, "ä\n")
    assert recalled(A) == "ä\n"
    (folder / f"{A}.txt.z").unlink()
    assert recalled(A) is None


def test_a_key_depends_on_kind_parts_and_versions() -> None:
    keys = [
        key_of("graph", ("a", b"b"), ("numpy",)),
        key_of("plan", ("a", b"b"), ("numpy",)),
        key_of("graph", ("ab", b""), ("numpy",)),
        key_of("graph", ("a", b"b"), ("torch",)),
        key_of("graph", ("a", b"b"), ("no-such-package",)),
    ]
    assert len(set(keys)) == 5
    assert keys[0] == key_of("graph", (b"a", "b"), ("numpy",))


@pytest.mark.parametrize("most", [{"TEXTS": 2}, {"BYTES": 20}], ids=["texts", "bytes"])
def test_what_was_not_asked_for_longest_goes(
    folder: Path, monkeypatch: pytest.MonkeyPatch, most: dict[str, int]
) -> None:
    for age, key in enumerate((A, B, C)):
        remember(key, "x")
        os.utime(folder / f"{key}.txt.z", (age, age))
    assert recalled(A) == "x"
    (bound,) = most
    monkeypatch.setattr(remembered, bound, most[bound])
    remember(D, "x")
    assert len(zlib.compress(b"x")) <= 10
    assert names(folder) == {f"{A}.txt.z", f"{D}.txt.z"}


def test_only_own_files_are_removed(folder: Path) -> None:
    folder.mkdir()
    digest = "0" * 64
    half = f".plan-{digest}.txt.z.ab12"
    for name in ("letter.txt", "0.txt.z", f"{digest}.txt", half):
        (folder / name).write_text("x")
    remember(A, "x")
    assert answers().counts == {"other": 1, "plan": 1, "word": 1}
    assert forget_all() == 3
    assert names(folder) == {"letter.txt", "0.txt.z"}
    assert answers() == Answers(counts={}, bytes=0)


def test_nothing_is_remembered_where_it_is_switched_off(folder: Path) -> None:
    remember(A, "x")
    with remembering_nothing():
        assert recalled(A) is None
        remember(B, "x")
    assert recalled(A) == "x"
    assert recalled(B) is None


def test_a_write_that_is_ended_leaves_no_half(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(A, "old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    remember(A, "new")
    with pytest.raises(UsageError, match="No space left"):
        write_whole(folder / "x", "new")
    assert recalled(A) == "old"
    assert names(folder) == {f"{A}.txt.z"}


def _write(text: str) -> None:
    for _ in range(50):
        remember(A, text)


def test_processes_that_write_at_once_leave_one_whole_text(folder: Path) -> None:
    texts = [letter * 100_000 for letter in "ab"]
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert recalled(A) in (None, *texts)
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    assert recalled(A) in texts
    assert names(folder) == {f"{A}.txt.z"}


def test_what_is_too_large_or_cannot_be_written_is_not_remembered(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    remember(A, "x" * (TEXT_BYTES + 1))
    monkeypatch.setattr(remembered, "FILE_BYTES", 1000)
    remember(A, "".join(map(chr, random.Random(0).choices(range(32, 127), k=2000))))
    assert not folder.exists()
    folder.write_text("no folder")
    remember(A, "x")
    assert recalled(A) is None
    monkeypatch.setenv(FOLDER, "")
    remember(A, "x")
    assert recalled(A) is None


def test_a_link_to_a_pipe_is_no_answer(folder: Path) -> None:
    remember(A, "x")
    (folder / f"{A}.txt.z").unlink()
    os.mkfifo(folder / f"{A}.txt.z")
    assert recalled(A) is None


@pytest.mark.parametrize(
    "stored",
    [b"x", zlib.compress(b"text")[:-1], zlib.compress(b"\xff"), zlib.compress(bytes(2**27))],
    ids=["not compressed", "cut", "no text", "too large when it is decompressed"],
)
def test_other_files_are_no_answers(folder: Path, stored: bytes) -> None:
    remember(A, "x")
    (folder / f"{A}.txt.z").write_bytes(stored)
    assert recalled(A) is None


def test_the_code_of_rooms_is_found() -> None:
    code = [source_of(*rooms) for rooms in (("ir",), ("ir", "remembered.py"), ("remembered.py",))]
    assert len(set(code)) == 3
    nothing = source_of()
    assert nothing not in (source_of("costmodel"), source_of("costmodel/presets"))
