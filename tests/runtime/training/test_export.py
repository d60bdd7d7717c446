"""Weights that leave as Hugging Face has them, and come back."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import autopar
from autopar.errors import AutoparError, UsageError
from autopar.runtime.launch import run_ranks
from autopar.runtime.training.export import export_checkpoint, export_weights
from autopar.runtime.training.saving import save
from tests.runtime.training.nets import Language, built, language, plan_of, tokens, train


def _exported(folder: str) -> bool:
    """Trained with stages, written, and read into another plan's shards."""
    module, optimizer = built("stages", 2)
    train(module, optimizer, range(2))
    export_weights(module, folder, limit=2000)
    with autopar.parameters_on_meta():
        empty = Language()
    again = autopar.parallelize(empty, plan_of("zero3", 2), (tokens(0),), weights=folder)
    whole = module.full_values(module.graph_parameters())
    return all(
        torch.equal(value, whole[name])
        for name, value in again.full_values(again.graph_parameters()).items()
    )


def test_from_stages_to_files_and_back(tmp_path: Path) -> None:
    plan_of("stages", 2)
    plan_of("zero3", 2)
    assert run_ranks(_exported, 2, str(tmp_path / "out")) == [True, True]
    index = json.loads(
        (tmp_path / "out" / "model.safetensors.index.json").read_text(encoding="utf-8")
    )
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 3 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    held: dict[str, torch.Tensor] = {}
    for file in files:
        held.update(load_file(tmp_path / "out" / file))
    assert set(held) == {name for name in language().state_dict() if name != "head.weight"}
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in held.values())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_type_and_no_prefix(tmp_path: Path) -> None:
    module = nn.ModuleDict({"model": language()})
    save(module, None, tmp_path / "saved", step=1)
    export_checkpoint(tmp_path / "saved", tmp_path / "out", dtype="bfloat16", strip="model.")
    actual = load_file(tmp_path / "out" / "model.safetensors")
    assert set(actual) == {name for name in language().state_dict() if name != "head.weight"}
    assert torch.equal(actual["qkv.weight"], language().qkv.weight.bfloat16())


@pytest.mark.slow
@pytest.mark.ci
def test_transformers_reads_it(tmp_path: Path) -> None:
    transformers = import_module("transformers")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=40, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    export_weights(model, tmp_path / "out", limit=10_000)
    config.save_pretrained(tmp_path / "out")
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert all(
        torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items()
    )
    assert again.lm_head.weight is again.transformer.wte.weight


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"dtype": "int8"}, "unknown floating-point type"),
        ({"strip": "x."}, "does not begin with 'x.'"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str
) -> None:
    save(language(), None, tmp_path / "saved", step=1)
    with pytest.raises(UsageError, match=said):
        export_checkpoint(tmp_path / "saved", tmp_path / "out", **options)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    with pytest.raises(AutoparError, match="is there already"):
        export_weights(language(), tmp_path / "saved")
