"""The table of plans of public configurations: its rows, and what counts as one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import configurations
from benchmarks.configurations import configuration, models, parts_of_gap, without_stored


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


def test_a_larger_model_is_a_file_with_other_fields(tmp_path: Path) -> None:
    _written(tmp_path, "Meta-Llama-3.1-405B", {"vocab_size": 9, "num_hidden_layers": 126})
    written = json.loads(configuration(tmp_path, "dense-1T", tmp_path).read_text())
    assert written["vocab_size"] == 9 and written["num_hidden_layers"] == 200
    assert configuration(tmp_path, "b", tmp_path) == tmp_path / "b" / "config.json"


def test_parts_of_a_gap_are_shares_of_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"gap": {"bound": 2.0, "seconds": {"candidate": 0.1, "memory": 0.0, "program": 0.01}}}
    monkeypatch.setattr(configurations, "measured", lambda command: ({}, json.dumps(told)))
    assert parts_of_gap(Path("plan"), Path("model")) == "candidate 5.0, program 0.5"
