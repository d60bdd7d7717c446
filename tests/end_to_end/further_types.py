"""Types of further families with the keys in which their small versions differ from others, and
types that are not read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TEXT = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "pad_token_id": 0,
}
FURTHER: Mapping[str, Mapping[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bailing_hybrid": {"num_key_value_heads": 4, "num_experts": 8, "n_group": 2, "num_group": 2},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "exaone4": {},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 8},
    "glm4_moe_lite": {"num_key_value_heads": 4},
    "hunyuan_v1_moe": {"head_dim": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gptj": {"rotary_dim": 8},
    "lfm2": {},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "m2m_100": {},
    "minicpm3": {"num_key_value_heads": 4},
    "modernbert": {},
    "olmoe": {},
    "seed_oss": {},
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"],
        "mamba_ngroups": 2,
        "n_mamba_heads": 4,
    },
    "deepseek_v4": {},
    # Code that makes a cache of its own, where its configuration asks for one.
    "kimi_linear": {"num_experts_per_token": 2, "num_expert_group": 1},
}
"""Types, and the keys in which they differ from the small sizes."""
_ALONE = """
    phi stablelm gpt_neox falcon gemma2 glm4 cohere helium olmo nemotron roberta albert distilbert
    mbart pegasus t5gemma phi4_multimodal
    """
WIDE: Mapping[str, Mapping[str, Any]] = {
    **{kind: {} for kind in _ALONE.split()},
    # An activation whose backward pass is written out.
    "bloom": {},
    # A cache of its own, too.
    "xlstm": {},
    # Biases of keys, whose gradients are zero but for rounding.
    "dinov2": {},
    # Gradients of time steps are sums whose terms cancel.
    "qwen3_5_text": {},
    "glm4v": {
        "text_config": {
            **_TEXT,
            "model_type": "glm4v_text",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "partial_rotary_factor": 1.0,
            },
        }
    },
}
"""Types that run in float64 and with AdamW: none has grouped products, which are narrower."""
ADAMW = frozenset({*WIDE, "deepseek_v4", "kimi_linear"})
"""Types whose plans are those of AdamW; all others have SGD."""
PICTURES = frozenset({"dinov2"})
"""Types of them whose batch has images alone."""
CASES = (
    *((kind, "zero3") for kind in FURTHER),
    *((kind, name) for kind in WIDE for name in ("searched", "zero3")),
)
"""Types, and the plans under which they run."""
UNREAD: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "phimoe": ({}, "PhimoeMultiplier is an autograd.Function with a backward pass of its own"),
    "longcat_flash": (
        {
            "num_key_value_heads": 4,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 16,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
        "its code reads a number of its data (`for expert_idx_tensor in expert_hit:`",
    ),
}
"""Types that are not read, their keys, and a part of what is said."""
