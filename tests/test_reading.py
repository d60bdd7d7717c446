"""Files that are read whole are regular files of a bounded size, or an error at once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.cli.entry import run
from autopar.errors import AutoparError, ModelError, PlanError, UsageError
from autopar.reading import read_bytes, read_json_object, read_text
from autopar.runtime.files.weight_files import read_headers
from autopar.runtime.training.tokens import tokens

LIMIT = 1000


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("ä" * 500, encoding="utf-8")
    assert read_text(path, LIMIT, what="plan", error=PlanError) == "ä" * 500
    (tmp_path / "link").symlink_to(path)
    assert len(read_bytes(str(tmp_path / "link"), LIMIT, what="plan", error=PlanError)) == LIMIT


@pytest.mark.parametrize("text", ["[1]", "{", "[" * 900, "", "3"])
def test_what_is_no_json_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1]}', encoding="utf-8")
    assert read_json_object(path, LIMIT, what="plan", error=PlanError) == {"a": [1]}
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PlanError, match=r"cannot be read as a plan|holds no JSON object"):
        read_json_object(path, LIMIT, what="plan", error=PlanError)


def test_what_is_too_large_or_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"x" * (LIMIT + 1))
    with pytest.raises(PlanError, match=r"a: larger than 1000 B, so it is no plan"):
        read_text(path, LIMIT, what="plan", error=PlanError)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UsageError, match="a: not text: "):
        read_text(path, LIMIT, what="plan", error=UsageError)
    with pytest.raises(UsageError, match=r"b: cannot be read: No such file"):
        read_text(tmp_path / "b", LIMIT, what="plan", error=UsageError)


def _strange(folder: Path) -> dict[str, Path]:
    """Paths that are no regular files, by what they are."""
    os.mkfifo(folder / "fifo.json")
    (folder / "zero.json").symlink_to("/dev/zero")
    (folder / "folder.json").mkdir()
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(folder / "socket.json"))
    return {
        "a named pipe": folder / "fifo.json",
        "a device": folder / "zero.json",
        "cannot be read: Is a directory": folder / "folder.json",
        "cannot be read: ": folder / "socket.json",
    }


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path) -> None:
    for kind, path in _strange(tmp_path).items():
        with pytest.raises(PlanError, match=kind):
            read_bytes(path, LIMIT, what="plan", error=PlanError)


COMMANDS = [
    ["run", "{}", "--model", "gpt2"],
    ["explain", "{}"],
    ["compare", "{}", "{}"],
    ["plan", "gpt2", "--cluster", "{}"],
    ["plan", "gpt2", "--reuse", "{}"],
    ["plan", "{}"],
    ["import", "{}", "--model", "gpt2"],
    ["train", "{}"],
]


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words))
def test_commands_refuse_strange_files(tmp_path: Path, words: list[str]) -> None:
    for path in _strange(tmp_path).values():
        with pytest.raises(AutoparError) as caught:
            run([word.format(path) for word in words])
        assert "\n" not in str(caught.value).strip()


def test_tokens_and_weights_are_regular_files(tmp_path: Path) -> None:
    for name in ("a.npy", "a.bin", "a.safetensors"):
        os.mkfifo(tmp_path / name)
    for name in ("a.npy", "a.bin"):
        with pytest.raises(UsageError, match="no regular file"):
            tokens(tmp_path / name, 4, type=None if name == "a.npy" else "uint8")
    with pytest.raises(ModelError, match="no regular file"):
        read_headers(tmp_path)


def test_a_pipe_does_not_hang_a_process(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "plan.json")
    words = [sys.executable, "-m", "autopar", "explain", str(tmp_path / "plan.json")]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == PlanError.exit_code and "a named pipe" in done.stderr
