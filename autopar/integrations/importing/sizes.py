"""The sizes of a model in a Hugging Face `config.json` that training arguments name, too."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autopar.errors import ModelError
from autopar.file_limits import CONFIGURATION_BYTES
from autopar.reading import read_json_object

FIELDS: Mapping[str, tuple[str, ...]] = {
    "layers": ("num_hidden_layers", "n_layer", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "num_heads"),
    "kv_heads": ("num_key_value_heads",),
    "ffn": ("intermediate_size", "n_inner", "d_ff"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts"),
}
"""The fields of each size in configurations of transformers, whatever the type."""


def sizes_of_model(path: Path) -> dict[str, int]:
    """The sizes that a configuration states; {} for an encoder and a decoder with sizes each."""
    data = read_json_object(path, CONFIGURATION_BYTES, what="configuration", error=ModelError)
    # A model of several kinds of inputs has those of its language model apart.
    text = data.get("text_config")
    if isinstance(text, dict):
        data = text
    if data.get("is_encoder_decoder") is True:
        return {}
    stated = {
        name: next((value for field in fields if (value := data.get(field)) is not None), None)
        for name, fields in FIELDS.items()
    }
    return {name: value for name, value in stated.items() if isinstance(value, int)}
