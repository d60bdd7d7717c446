"""Narrow models of linear recurrences: gated delta nets, and Mamba-2 beside attention and alone."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from torch import nn

RECURRENT: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    # A gated delta net, then attention; feed-forward layers without experts.
    "qwen3_next": (
        "Qwen3Next",
        {
            "num_hidden_layers": 2,
            "head_dim": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
            "mlp_only_layers": [0, 1],
        },
    ),
    # A Mamba-2 layer, then attention.
    "nemotron_h": (
        "NemotronH",
        {
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 4,
            "layers_block_type": ["mamba", "attention"],
        },
    ),
    # Mamba-2 layers alone.
    "mamba2": (
        "Mamba2",
        {
            "num_hidden_layers": 2,
            "num_heads": 4,
            "head_dim": 32,
            "state_size": 8,
            "n_groups": 2,
            "chunk_size": 4,
        },
    ),
}
"""Classes of recurrent models, and the keys of each."""


def recurrent_model(name: str, vocab_size: int) -> nn.Module:
    """A language model of the table."""
    family, keys = RECURRENT[name]
    library = import_module("transformers")
    config = getattr(library, f"{family}Config")(
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=vocab_size,
        pad_token_id=0,
        **keys,
    )
    model: nn.Module = getattr(library, f"{family}ForCausalLM")(config)
    return model
