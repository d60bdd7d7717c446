"""Which ranks are left out: those that fail by themselves, again and again; never all of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.errors import PlanError
from autopar.runtime.launch.failing_ranks import ALONE, WITH_OTHERS, failing, is_of_others, sweep

A = ALONE
W = WITH_OTHERS
ROWS: dict[str, tuple[list[list[tuple[str, str]]], dict[str, int]]] = {
    "the first life": ([[], []], {}),
    "one fault": ([[(A, "")], [(W, "")]], {}),
    "two, no checkpoint between": ([[(W, "4"), (W, "4")], [(A, "4"), (A, "4")]], {"1": 2}),
    "two, and progress": ([[(W, "2"), (W, "4")], [(A, "2"), (A, "4")]], {}),
    "three, and progress": ([[(W, "")] * 3, [(A, ""), (A, "2"), (A, "4")]], {"1": 3}),
    "with others between": ([[(W, "4")] * 3, [(A, "4"), (W, "4"), (A, "4")]], {}),
    "each once": ([[(A, "4"), (W, "4")], [(W, "4"), (A, "4")]], {}),
    "everyone": ([[(A, "4"), (A, "4")], [(A, "4"), (A, "4")]], {}),
    "two of three": ([[(A, "4")] * 2, [(W, "4")] * 2, [(A, "4")] * 2], {"0": 2, "2": 2}),
    "long ago": ([[(W, "4")] * 3, [(A, "4"), (A, "4"), (W, "4")]], {}),
}


@pytest.mark.parametrize("row", ROWS)
def test_who_is_left_out(tmp_path: Path, row: str) -> None:
    pasts, wanted = ROWS[row]
    members = [f"host.1.{rank}" for rank in range(len(pasts))]
    for member, past in zip(members, pasts, strict=True):
        lives = [{"word": word, "progress": progress} for word, progress in [*past, (A, "4")]]
        (tmp_path / f"{member}.json").write_text(json.dumps(lives), encoding="utf-8")
    assert failing(tmp_path, members, "4") == wanted


@pytest.mark.parametrize("text", ["", "{", "[1]", '[{"word": "alone"}]'])
def test_a_damaged_file_blames_nobody(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    assert failing(tmp_path, ["a", "b"], "") == {}


def test_files_of_other_launchers_go(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.json").write_text("[]", encoding="utf-8")
    sweep(tmp_path, ["a"])
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]


def _own() -> PlanError:
    error = PlanError("rank 1 cannot take part: no memory")
    error.__cause__ = MemoryError()
    return error


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (
            RuntimeError(
                "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"
            ),
            True,
        ),
        (PlanError("rank 1 cannot take part: no memory"), True),
        (_own(), False),
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), True),
    ],
    ids=str,
)
def test_whose_fault(error: BaseException, wanted: bool) -> None:
    assert is_of_others(error) == wanted
