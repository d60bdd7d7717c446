"""Descriptions of configurations, recalled without the import of their project."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

from autopar.analysis.described import described_model
from autopar.frontends.huggingface.types import Described
from autopar.remembered import FOLDER
from tests.end_to_end.small_types import small_configuration

pytest.importorskip("transformers")


@pytest.fixture(name="folder")
def folder_of_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FOLDER, str(tmp_path / "answers"))
    (tmp_path / "config.json").write_text(json.dumps(small_configuration("qwen3_moe")))
    return tmp_path


def _never(*given: Any) -> Described:
    raise AssertionError("it is described anew")


def test_a_description_is_recalled(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = described_model(str(folder))
    monkeypatch.setattr("autopar.analysis.described.described", _never)
    assert described_model(str(folder / "config.json")) == first
    (folder / "config.json").write_text(json.dumps(small_configuration("qwen3")))
    with pytest.raises(AssertionError, match="anew"):
        described_model(str(folder))


def test_what_is_no_description_is_made_anew(folder: Path) -> None:
    first = described_model(str(folder))
    (path,) = (folder / "answers").iterdir()
    stored = zlib.decompress(path.read_bytes()).decode()
    for text in ("", "{}", stored.replace(": [", ": {"), '{"kind": 3}'):
        path.write_bytes(zlib.compress(text.encode()))
        assert described_model(str(folder)) == first


def test_the_second_answer_imports_no_torch(folder: Path) -> None:
    described_model(str(folder))
    program = (
        "import sys; from autopar.cli import run; "
        f"run(['models', {str(folder)!r}]); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    answer = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert "Qwen3MoeForCausalLM of transformers" in answer.stdout
