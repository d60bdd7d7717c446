"""Small copies of configurations: what they keep, and that their types are proved by them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar import configured
from autopar.analysis import import_proofs
from autopar.analysis.import_proofs import proof_of
from autopar.configured import load_any
from autopar.errors import ModelError
from autopar.frontends.load import ModelOptions
from autopar.model import LoadedModel
from autopar.remembered import FOLDER

pytest.importorskip("transformers")

OPTIONS = ModelOptions(batch=4, dims={"sequence": 32})
_WIDTHS: Mapping[str, Any] = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 4096,
    "pad_token_id": 4000,
    "bos_token_id": 4001,
    "eos_token_id": [4002, 4003],
}
TYPES: Mapping[str, Mapping[str, Any]] = {
    "llama": {**_WIDTHS, "num_hidden_layers": 4},
    "qwen3_moe": {
        **_WIDTHS,
        "num_hidden_layers": 4,
        "mlp_only_layers": [0],
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 256,
    },
    "gemma3_text": {
        **_WIDTHS,
        "num_hidden_layers": 8,
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2
        + ["sliding_attention"] * 2,
        "sliding_window": 16,
    },
}


def loaded(folder: Path, kind: str) -> LoadedModel:
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": kind, **TYPES[kind]}))
    return load_any(f"hf:{path}", OPTIONS)


def config_of(model: LoadedModel) -> Any:
    assert model.small is not None
    return next(model.small.of(model.source))().given.config


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AUTOPAR_CHECKS", "on")
    monkeypatch.setattr(import_proofs, "_proofs", {})
    monkeypatch.setenv(FOLDER, str(tmp_path / "answers"))


@pytest.mark.parametrize("kind", TYPES)
def test_a_type_is_proved_by_a_small_copy(tmp_path: Path, kind: str) -> None:
    said = proof_of(loaded(tmp_path, kind))
    assert said.startswith("the import is proved on one device, by a copy of its type")
    assert "without" not in said


def test_a_copy_has_every_kind_of_layer_and_equal_sizes_stay_equal(tmp_path: Path) -> None:
    config = config_of(loaded(tmp_path, "gemma3_text"))
    assert config.layer_types == ["sliding_attention"] * 2 + ["full_attention"]
    assert (config.hidden_size, config.intermediate_size) == (128, 256)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 32)
    assert config.sliding_window < 8
    marks = {config.pad_token_id, config.bos_token_id, *config.eos_token_id}
    assert len(marks) == 4 and max(marks) < config.vocab_size < 4096


def test_layers_of_experts_are_kept_beside_those_without(tmp_path: Path) -> None:
    config = config_of(loaded(tmp_path, "qwen3_moe"))
    assert (config.num_hidden_layers, config.mlp_only_layers) == (2, [0])
    assert (config.num_experts, config.num_experts_per_tok) == (8, 2)


def test_a_wrong_operator_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    imported = configured._imported

    def wrong(*given: Any) -> LoadedModel:
        model = imported(*given)
        others = tuple(
            replace(op, kind="aten.sub.Tensor") if op.kind == "aten.add.Tensor" else op
            for op in model.source.operators
        )
        return replace(model, source=replace(model.source, operators=others))

    model = loaded(tmp_path, "llama")
    monkeypatch.setattr(configured, "_imported", wrong)
    with pytest.raises(ModelError, match=r"something else than the model.*aten\.sub"):
        proof_of(model)


def test_a_remembered_proof_needs_no_torch(tmp_path: Path) -> None:
    proof_of(loaded(tmp_path, "llama"))
    code = (
        "import sys\n"
        "from autopar.configured import load_any\n"
        "from autopar.frontends.load import ModelOptions\n"
        "from autopar.analysis.import_proofs import proof_of\n"
        f"model = load_any({f'hf:{tmp_path}/config.json'!r}, "
        "ModelOptions(batch=4, dims={'sequence': 32}))\n"
        "assert 'is proved' in proof_of(model)\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=dict(os.environ))


def test_other_sizes_of_a_type_are_proved_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof_of(loaded(tmp_path, "llama"))
    monkeypatch.setitem(sys.modules, "autopar.runtime.import_proof", None)
    monkeypatch.setitem(TYPES, "llama", {**TYPES["llama"], "hidden_size": 1024})  # type: ignore[arg-type]
    assert "is proved" in proof_of(loaded(tmp_path, "llama"))
