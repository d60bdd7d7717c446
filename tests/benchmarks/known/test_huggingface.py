"""Sizes of models as configurations of Hugging Face have them, and files that are none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar.errors import ModelError, UsageError
from benchmarks.validating.known import Latent, Shape
from benchmarks.validating.known.shape import StateSpace
from benchmarks.validating.known.transformer import transformer

SMALL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
}
LLAMA = SMALL | {
    "model_type": "llama",
    "num_key_value_heads": 2,
    "intermediate_size": 1408,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 256}


def shape_of(folder: Path, config: dict[str, Any], *, sequence: int | None = None) -> Shape:
    """The sizes of a configuration written into the folder."""
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return Shape.of(folder / "config.json", sequence=sequence)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        # As counted by transformers 5.23 on the meta device.
        (LLAMA, 6_662_656),
        (LLAMA | {"model_type": "qwen3", "head_dim": 128}, 7_973_888),
        (LLAMA | {"model_type": "mixtral", "num_local_experts": 8}, 36_948_480),
        (
            {
                "model_type": "gpt2",
                "n_embd": 768,
                "n_layer": 12,
                "n_head": 12,
                "n_positions": 1024,
                "vocab_size": 50257,
            },
            124_439_808,
        ),
        (
            SMALL
            | {"model_type": "gpt_neox", "intermediate_size": 2048, "tie_word_embeddings": False},
            7_329_792,
        ),
    ],
)
def test_parameters_of_a_configuration_are_those_of_the_model(
    config: dict[str, Any], parameters: int, tmp_path: Path
) -> None:
    graph = transformer(shape_of(tmp_path, config), batch=1).graph
    assert sum(t.size for t in graph.parameters) == parameters


def test_a_configuration_of_deepseek_has_all_its_parts(tmp_path: Path) -> None:
    config = (
        SMALL
        | EXPERTS
        | {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 4,
            "intermediate_size": 1408,
            "n_routed_experts": 16,
            "n_shared_experts": 2,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 256,
            "kv_lora_rank": 128,
            "num_nextn_predict_layers": 1,
        }
    )
    shape = shape_of(tmp_path, config, sequence=64)
    assert shape.latent == Latent(kv_rank=128, q_rank=256, nope=128, rope=64, value=128)
    assert (shape.shared_ffn, shape.groups, shape.top_groups) == (512, 4, 2)
    assert (shape.mtp, shape.sequence) == (1, 64)
    assert shape.kinds() == ("dense", "experts", "experts", "experts")


def test_windows_alternate_as_the_types_of_layers_say(tmp_path: Path) -> None:
    types = ["sliding_attention", "full_attention"] * 2
    config = LLAMA | {"num_hidden_layers": 4, "sliding_window": 128, "layer_types": types}
    shape = shape_of(tmp_path, config)
    assert shape.kinds() == ("dense windowed", "dense", "dense windowed", "dense")


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ('{"model_type": "llama"}', ModelError, "hidden_size"),
        ("[1]", ModelError, "holds no JSON object"),
        ("{", ModelError, "cannot be read as a configuration"),
        ("[" * 100_000, ModelError, "cannot be read as a configuration"),
        (json.dumps(LLAMA | {"hidden_size": 2**40}), ModelError, "hidden_size"),
        (
            json.dumps(LLAMA | {"num_attention_heads": 7, "num_key_value_heads": 7}),
            ModelError,
            "7 heads must divide hidden 512",
        ),
        (
            json.dumps(LLAMA | {"model_type": "mamba"}),
            UsageError,
            "unknown model_type 'mamba': valid are",
        ),
    ],
)
def test_files_that_are_no_configuration_are_refused(
    text: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(error, match=message):
        Shape.of(path)
    with pytest.raises(ModelError, match="nowhere"):
        Shape.of(tmp_path / "nowhere.json")


# --- state spaces ---

HYBRID: dict[str, Any] = {
    "model_type": "nemotron_h",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1000,
    "intermediate_size": 4096,
    "hybrid_override_pattern": "M-*E",
    "mamba_num_heads": 32,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "chunk_size": 256,
    "n_routed_experts": 16,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 512,
    "moe_shared_expert_intermediate_size": 1024,
    "moe_latent_size": 256,
    "num_nextn_predict_layers": 1,
    "mtp_hybrid_override_pattern": "*E",
}


def test_hybrid_configurations_are_read(tmp_path: Path) -> None:
    shape = shape_of(tmp_path, HYBRID, sequence=512)
    assert shape.state == StateSpace(heads=32, width=64, size=128, groups=8, chunk=256)
    assert (shape.pattern, shape.gated, shape.position) == ("M-*E", False, "none")
    assert (shape.mtp, shape.mtp_pattern) == (1, "*E")
    sizes = (shape.experts, shape.top_k, shape.expert_ffn, shape.shared_ffn, shape.expert_hidden)
    assert sizes == (16, 6, 512, 1024, 256)
    with pytest.raises(ModelError, match=r"config\.json: .*X"):
        shape_of(tmp_path, HYBRID | {"hybrid_override_pattern": "M-X"})


@pytest.mark.parametrize(
    ("config", "pattern", "heads"),
    [
        ({"model_type": "mamba2", "num_heads": 32, "head_dim": 64, "state_size": 64}, "MMMM", 32),
        (
            {
                "model_type": "bamba",
                "attn_layer_indices": [2],
                "mamba_n_heads": 32,
                "mamba_d_head": 64,
            },
            "M-M-*-M-",
            32,
        ),
        (
            {
                "model_type": "granitemoehybrid",
                "num_local_experts": 8,
                "mamba_d_head": 128,
                "shared_intermediate_size": 256,
                "layer_types": ["mamba", "attention", "mamba", "mamba"],
            },
            "ME*EMEME",
            16,
        ),
    ],
)
def test_other_models_of_state_spaces_are_read(
    config: dict[str, Any], pattern: str, heads: int, tmp_path: Path
) -> None:
    base = {
        "hidden_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "vocab_size": 1000,
        "intermediate_size": 2048,
    }
    shape = shape_of(tmp_path, base | config, sequence=512)
    assert (shape.pattern, shape.layers) == (pattern, len(pattern))
    assert shape.state is not None and shape.state.heads == heads
    assert transformer(shape, batch=1).graph.operators
