"""The table of plans of public configurations: its rows, and what counts as one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import configurations
from benchmarks.configurations import models, without_stored


def _written(folder: Path, name: str, keys: dict[str, Any]) -> None:
    (folder / name).mkdir()
    (folder / name / "config.json").write_text(json.dumps(keys))


def test_files_that_store_one_model_otherwise_are_one_row(tmp_path: Path) -> None:
    _written(tmp_path, "a-FP8", {"model_type": "x", "quantization_config": {"bits": 8}})
    _written(tmp_path, "a", {"model_type": "x", "torch_dtype": "bfloat16"})
    _written(tmp_path, "b", {"model_type": "x", "hidden_size": 3})
    made = [(path.parent.name, names) for path, names in models(tmp_path, ())]
    assert made == [("a", ["a", "a-FP8"]), ("b", ["b"])]
    assert [names for _, names in models(tmp_path, ("b",))] == [["b"]]


def test_nested_fields_of_storage_are_left_out() -> None:
    nested = {"text_config": {"dtype": "float16", "layers": [{"dtype": 1, "size": 2}]}}
    assert without_stored(nested) == {"text_config": {"layers": [{"dtype": 1, "size": 2}]}}


def test_a_page_has_a_row_for_each_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _written(tmp_path, "a", {"model_type": "x"})
    told = {
        "models": {"kind": "x", "parameters": 2_000_000_000, "active": 1_000_000_000},
        "plan": {
            "summary": {
                "step": 0.5,
                "tokens_per_second_per_device": 1234.0,
                "mfu": 0.4,
                "memory": 3 * 2**30,
                "gap": 0.05,
                "sentence": "split",
                "notes": [],
            }
        },
    }
    cost = {"cpu_s": 7.0, "wall_s": 8.0, "peak_gb": 1.0}
    monkeypatch.setattr(
        configurations, "measured", lambda command: (cost, json.dumps(told[command[3]]))
    )
    page = tmp_path / "page.md"
    monkeypatch.setattr("sys.argv", ["configurations", str(tmp_path), "--page", str(page)])
    configurations.main()
    row = "| a | x | 2.00 B | 1.00 B | 0.5 s | 1,234 | 40.0 % | 3.0 GiB | 5 % | 7 s |"
    assert row in page.read_text() and row in capsys.readouterr().out
