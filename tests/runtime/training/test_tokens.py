"""Files of tokens: mapped windows, and what is none."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import autopar
from autopar.errors import UsageError


@pytest.mark.parametrize("kind", ["uint8", "uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("ending", [".npy", ".bin"])
def test_windows(tmp_path: Path, kind: str, ending: str) -> None:
    values = np.arange(11).astype(kind)
    path = tmp_path / f"tokens{ending}"
    np.save(path, values) if ending == ".npy" else values.tofile(path)
    windows = autopar.tokens(path, 4, type=None if ending == ".npy" else kind)
    assert len(windows) == 2 and [windows[place].tolist() for place in (1, 0)] == [
        [4, 5, 6, 7],
        [0, 1, 2, 3],
    ]
    assert windows[0].dtype == torch.long
    with pytest.raises(IndexError):
        windows[2]


def test_a_token_that_the_model_does_not_know(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 3, 9]))
    windows = autopar.tokens(tmp_path / "tokens.npy", 2, limit=9)
    assert windows[0].tolist() == [1, 2]
    with pytest.raises(UsageError, match="token 9 in sample 1 is none of the model's 9"):
        windows[1]
    np.save(tmp_path / "tokens.npy", np.array([-1, 2]))
    with pytest.raises(UsageError, match="token -1 in sample 0"):
        autopar.tokens(tmp_path / "tokens.npy", 2)[0]


def test_what_is_no_file_of_tokens(tmp_path: Path) -> None:
    np.save(tmp_path / "floats.npy", np.ones(8))
    np.save(tmp_path / "square.npy", np.ones((8, 8), dtype=np.int64))
    np.save(tmp_path / "objects.npy", np.array([{}], dtype=object))
    (tmp_path / "odd.bin").write_bytes(b"123")
    (tmp_path / "none.bin").write_bytes(b"")
    rows: list[tuple[str, int, str | None, str]] = [
        ("floats.npy", 2, None, "float64"),
        ("square.npy", 2, None, "tokens are one row"),
        ("square.npy", 2, "uint8", "tokens are one row of uint8"),
        ("objects.npy", 2, None, "no file of tokens"),
        ("odd.bin", 1, "uint16", "no file of tokens"),
        ("odd.bin", 4, "uint8", "has 3 tokens, which is no sample of 4"),
        ("odd.bin", 0, "uint8", "at least 1 token"),
        ("odd.bin", 1, "uint9", "unknown type of tokens 'uint9'"),
        ("none.bin", 1, "uint8", "no file of tokens"),
    ]
    for name, sequence, kind, said in rows:
        with pytest.raises(UsageError, match=said):
            autopar.tokens(tmp_path / name, sequence, type=kind)
