"""Narrow versions of the types that transformers knows: each type's own keys, with small sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZES: Mapping[int, str] = {
    4: """num_hidden_layers n_layer num_layers n_layers num_attention_heads n_head n_heads num_heads
        encoder_attention_heads decoder_attention_heads num_experts num_local_experts
        n_routed_experts linear_num_value_heads mamba_num_heads mamba_n_heads""",
    2: """encoder_layers decoder_layers num_key_value_heads num_experts_per_tok experts_per_token
        n_group linear_num_key_heads n_groups mamba_n_groups index_n_heads""",
    1: "n_shared_experts topk_group first_k_dense_replace decoder_sparse_step",
    8: """head_dim global_head_dim d_kv qk_nope_head_dim qk_rope_head_dim v_head_dim
        linear_key_head_dim linear_value_head_dim ssm_state_size mamba_d_state chunk_size
        mamba_chunk_size index_head_dim index_topk sliding_window patch_size num_mel_bins
        attention_chunk_size""",
    16: """moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank
        mamba_head_dim mamba_d_head max_source_positions""",
    32: "hidden_size d_model n_embd dim image_size",
    64: """intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim max_position_embeddings
        n_positions intermediate_size_mlp""",
    128: "vocab_size",
}
"""Sizes and the keys that take them."""
_SMALL = {key: size for size, keys in SIZES.items() for key in keys.split()}
_DERIVED = frozenset(
    {"layer_types", "mlp_layer_types", "layers_block_type", "rope_parameters", "no_rope_layers"}
)
"""Keys that a type makes of others, for as many layers as there are."""
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

_DENSE = """
    llama mistral qwen2 qwen3 gemma3_text olmo2 olmo3 cohere2 phi3 smollm3 granite bert vit gpt2 opt
    starcoder2
    """
_OF_EXPERTS = """
    mixtral qwen2_moe qwen3_moe qwen3_next gpt_oss glm4_moe nemotron_h minimax_m2 ernie4_5_moe
    qwen3_5_moe_text mimo_v2_flash minimax_m3_vl_text llama4_text
    """
TYPES: Mapping[str, Mapping[str, Any]] = {
    **{kind: {} for kind in (_DENSE + _OF_EXPERTS).split()},
    "bamba": {"attn_layer_indices": [1]},
    "deepseek_v3": {"num_key_value_heads": 4},
    # Sparse attention by an indexer; in MiniMax-M3 above, too.
    "deepseek_v32": {"num_key_value_heads": 4},
    "glm_moe_dsa": {"num_key_value_heads": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 8},
    "t5": {"decoder_start_token_id": 0},
}
"""Types, and the keys in which they differ from the sizes above."""


WITH_EXPERTS = frozenset(
    {*_OF_EXPERTS.split(), "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "granitemoehybrid"}
)
"""Types whose experts are grouped products, which torch has in no type wider than float32."""
REFUSED = frozenset(
    {
        ("minimax_m2", "megatron"),
        ("olmo3", "megatron"),
        ("olmo2", "megatron"),
        ("llama4_text", "zero3"),
        ("llama4_text", "pipeline"),
    }
)
"""Types and plans that cannot be: norms of queries and keys that are over all heads, and experts
that each compute all tokens in one batch of products.
"""


def small_configuration(kind: str) -> dict[str, Any]:
    """A `config.json` of a type with small sizes; all other keys are the defaults of the type."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return {
        **_shrunk(CONFIG_MAPPING[kind]().to_dict()),
        **_TOKENS,
        **TYPES.get(kind, {}),
        "model_type": kind,
    }


def _shrunk(keys: Mapping[str, Any]) -> dict[str, Any]:
    small: dict[str, Any] = {}
    for key, value in keys.items():
        if isinstance(value, dict) and "model_type" in value:
            small[key] = {**_shrunk(value), "model_type": value["model_type"]}
        elif key in _SMALL and key not in _DERIVED and value is not None:
            small[key] = _SMALL[key]
    return small
