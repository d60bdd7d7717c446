"""Sizes from Hugging Face `config.json` files, by the meaning of their keys in each model type.

Nothing in a file is executed.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.errors import ModelError, UsageError, unknown
from autopar.file_limits import CONFIGURATION_BYTES
from autopar.reading import read_json_object

MOST = 2**24
"""The largest size that a configuration may give."""
Size = Annotated[int, Field(ge=1, le=MOST)]
Count = Annotated[int, Field(ge=0, le=MOST)]


class Config(BaseModel):
    """The keys that tell sizes, under the names that most model types use.

    Other keys are of no consequence here.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)

    model_type: str
    hidden_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size = 1
    num_key_value_heads: Size | None = None
    intermediate_size: Size | None = None
    vocab_size: Size = 1
    max_position_embeddings: Size = 2048
    head_dim: Size | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    sliding_window: Size | None = None
    use_sliding_window: bool = True
    layer_types: list[str] | None = None
    num_local_experts: Count = 0
    num_experts: Count = 0
    n_routed_experts: Count = 0
    num_experts_per_tok: Size = 2
    moe_intermediate_size: Size | None = None
    n_shared_experts: Count | None = None
    shared_expert_intermediate_size: Count = 0
    first_k_dense_replace: Count = 0
    decoder_sparse_step: Size = 1
    n_group: Size | None = None
    topk_group: Size | None = None
    q_lora_rank: Count | None = None
    kv_lora_rank: Size | None = None
    qk_nope_head_dim: Size = 128
    qk_rope_head_dim: Size = 64
    v_head_dim: Size = 128
    num_nextn_predict_layers: Count = 0
    moe_latent_size: Count | None = None
    moe_shared_expert_intermediate_size: Count = 0
    hybrid_override_pattern: str = Field(default="", max_length=4096)
    mtp_hybrid_override_pattern: str = Field(default="", max_length=64)
    attn_layer_indices: list[int] | None = None
    mamba_num_heads: Size | None = None
    mamba_head_dim: Size = 64
    ssm_state_size: Size = 128
    n_groups: Size = 1
    chunk_size: Size = 256
    expand: Size = 2
    num_decoder_layers: Size | None = None
    image_size: Size = 224
    patch_size: Size = 16
    num_labels: Size = 1000


_BAMBA = {
    "mamba_n_heads": "mamba_num_heads",
    "mamba_d_head": "mamba_head_dim",
    "mamba_d_state": "ssm_state_size",
    "mamba_n_groups": "n_groups",
    "mamba_chunk_size": "chunk_size",
    "mamba_expand": "expand",
}
RENAMED: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "n_embd": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "n_inner": "intermediate_size",
        "n_positions": "max_position_embeddings",
    },
    "bloom": {
        "n_embed": "hidden_size",
        "n_layer": "num_hidden_layers",
        "n_head": "num_attention_heads",
        "seq_length": "max_position_embeddings",
    },
    "mpt": {
        "d_model": "hidden_size",
        "n_layers": "num_hidden_layers",
        "n_heads": "num_attention_heads",
        "max_seq_len": "max_position_embeddings",
    },
    "opt": {"ffn_dim": "intermediate_size"},
    "mamba2": {
        "num_heads": "mamba_num_heads",
        "head_dim": "mamba_head_dim",
        "state_size": "ssm_state_size",
    },
    "nemotron_h": {"attention_head_dim": "head_dim"},
    "bamba": _BAMBA,
    "granitemoehybrid": {**_BAMBA, "shared_intermediate_size": "shared_expert_intermediate_size"},
    "t5": {
        "d_model": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "d_ff": "intermediate_size",
        "d_kv": "head_dim",
        "n_positions": "max_position_embeddings",
    },
}
"""Keys of model types that have names of their own."""

Traits = Callable[[Config], dict[str, Any]]


def _plain(**fixed: Any) -> Traits:
    return lambda c: dict(fixed)


_GPT: dict[str, Any] = {"gated": False, "bias": True, "norm": "layer_norm", "dropout": False}
_LLAMA: dict[str, Any] = {
    "gated": True,
    "bias": False,
    "norm": "rms_norm",
    "dropout": False,
    "position": "rotary",
}


def _llama(**more: Any) -> Traits:
    return lambda c: {**_LLAMA, "qkv_bias": c.attention_bias, **more}


def _state(c: Config, pattern: str, **more: Any) -> dict[str, Any]:
    """The traits of a model with this pattern, whose layers are one mixer each."""
    heads = c.mamba_num_heads or c.expand * c.hidden_size // c.mamba_head_dim
    state = {
        "heads": heads,
        "width": c.mamba_head_dim,
        "size": c.ssm_state_size,
        "groups": c.n_groups,
        "chunk": c.chunk_size,
    }
    return {
        **_LLAMA,
        "position": "none",
        "pattern": pattern,
        "layers": len(pattern),
        "state": state,
        **more,
    }


def _nemotron(c: Config) -> dict[str, Any]:
    pattern = c.hybrid_override_pattern.partition("/")[0].replace("|", "")
    more = (
        {
            "expert_hidden": c.moe_latent_size or 0,
            "shared_ffn": c.moe_shared_expert_intermediate_size,
        }
        if "E" in pattern
        else {}
    )
    return _state(
        c,
        pattern,
        gated=False,
        mtp_pattern=c.mtp_hybrid_override_pattern if c.num_nextn_predict_layers else "",
        **more,
    )


def _alternating(c: Config, whole: Container[int]) -> dict[str, Any]:
    """The traits of a model that alternates mixers with feed-forward parts or experts.

    A mixer is attention in the layers of `whole`, and a state space in all others.
    """
    feed = "E" if c.num_local_experts else "-"
    return _state(
        c, "".join(("*" if index in whole else "M") + feed for index in range(c.num_hidden_layers))
    )


TYPES: Mapping[str, Traits] = {
    **dict.fromkeys(
        (
            "llama",
            "mistral",
            "ministral",
            "granite",
            "smollm3",
            "stablelm",
            "olmo",
            "seed_oss",
            "mixtral",
        ),
        _llama(),
    ),
    "qwen2": _llama(qkv_bias=True),
    "qwen2_moe": _llama(qkv_bias=True),
    **dict.fromkeys(("qwen3", "qwen3_moe", "olmo2", "glm4_moe"), _llama(qk_norm=True)),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "kimi_k2"), _llama()),
    "gpt_oss": lambda c: {**_LLAMA, "bias": True, "full_every": 2},
    **dict.fromkeys(("gemma", "gemma2"), _llama()),
    "gemma3_text": _llama(qk_norm=True),
    "phi3": _llama(),
    **dict.fromkeys(("phi", "gpt_neox", "starcoder2"), _plain(**_GPT, position="rotary")),
    **dict.fromkeys(("gpt2", "opt"), _plain(**_GPT)),
    "bloom": _plain(**_GPT, position="alibi"),
    "mpt": _plain(**{**_GPT, "bias": False}, position="alibi"),
    "bert": _plain(**_GPT, causal=False),
    "t5": lambda c: {
        **_GPT,
        "bias": False,
        "norm": "rms_norm",
        "position": "none",
        "layers": c.num_decoder_layers or c.num_hidden_layers,
        "encoder_layers": c.num_hidden_layers,
    },
    "mamba2": lambda c: _state(c, "M" * c.num_hidden_layers),
    "nemotron_h": _nemotron,
    "bamba": lambda c: _alternating(c, c.attn_layer_indices or ()),
    "granitemoehybrid": lambda c: _alternating(
        c, [i for i, kind in enumerate(c.layer_types or ()) if kind == "attention"]
    ),
    "vit": lambda c: {
        **_GPT,
        "causal": False,
        "patch": c.patch_size,
        "vocab": c.num_labels,
        "sequence": (c.image_size // c.patch_size) ** 2,
        "tied": False,
    },
}
"""Traits by `model_type` that the sizes do not tell."""


def sizes_of(path: str | Path, *, sequence: int | None = None) -> dict[str, Any]:
    """The fields of a `Shape` in a configuration file; `latent` is a table of its own.

    `sequence`: the length of the sequences (default: the longest that the positions allow). Raises
    `ModelError` if the file cannot be read or lacks a size, `UsageError` for an unknown model type.
    """
    config = _read(Path(path))
    if config.model_type not in TYPES:
        raise UsageError(unknown("model_type", config.model_type, sorted(TYPES)))
    heads = config.num_attention_heads
    given: dict[str, Any] = {
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "heads": heads,
        # With latent attention every head has keys and values of its own.
        "kv_heads": heads if config.kv_lora_rank else config.num_key_value_heads or heads,
        "ffn": config.intermediate_size or 4 * config.hidden_size,
        "vocab": config.vocab_size,
        "sequence": sequence or config.max_position_embeddings,
        "tied": config.tie_word_embeddings,
        "head_size": config.head_dim or 0,
    }
    return given | _attention(config) | _experts(config) | TYPES[config.model_type](config)


def _attention(c: Config) -> dict[str, Any]:
    fields: dict[str, Any] = {"mtp": c.num_nextn_predict_layers}
    if c.kv_lora_rank:
        latent = {
            "kv_rank": c.kv_lora_rank,
            "q_rank": c.q_lora_rank or 0,
            "nope": c.qk_nope_head_dim,
            "rope": c.qk_rope_head_dim,
            "value": c.v_head_dim,
        }
        fields |= {"latent": latent, "head_size": 0}
        # A shape without a head size needs heads that divide `hidden`.
        if c.hidden_size % c.num_attention_heads:
            fields["head_size"] = c.v_head_dim
    if c.sliding_window and c.use_sliding_window:
        fields["window"] = c.sliding_window
        # The kinds repeat, so the first layer with full attention tells the period.
        whole = [
            index for index, kind in enumerate(c.layer_types or ()) if kind == "full_attention"
        ]
        fields["full_every"] = whole[0] + 1 if whole else 0
    return fields


def _experts(c: Config) -> dict[str, Any]:
    experts = c.num_local_experts or c.num_experts or c.n_routed_experts
    if not experts:
        return {}
    width = c.moe_intermediate_size or c.intermediate_size or 4 * c.hidden_size
    fields = {
        "experts": experts,
        "top_k": c.num_experts_per_tok,
        "expert_ffn": width,
        "dense_layers": c.first_k_dense_replace,
        "expert_every": c.decoder_sparse_step,
        "shared_ffn": c.shared_expert_intermediate_size or width * (c.n_shared_experts or 0),
    }
    return fields | (
        {"groups": c.n_group, "top_groups": c.topk_group}
        if c.n_group and c.topk_group and c.n_group > 1
        else {}
    )


def _read(path: Path) -> Config:
    data = read_json_object(path, CONFIGURATION_BYTES, what="configuration", error=ModelError)
    # Models of text and images keep the sizes of their language model in a table of its own.
    if isinstance(data.get("text_config"), dict) and "hidden_size" not in data:
        data = {**data, **data["text_config"]}
    names = RENAMED.get(str(data.get("model_type")), {})
    # A null stands for the default of its key.
    renamed = {names.get(key, key): value for key, value in data.items() if value is not None}
    try:
        return Config.model_validate(renamed)
    except ValidationError as error:
        first = error.errors()[0]
        raise ModelError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from error
