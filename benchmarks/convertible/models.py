"""Twenty public architectures, small: language, vision, both, speech, diffusion, state space."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[nn.Module, tuple[Tensor, ...]]
BATCH = 8
LENGTH = 16
VOCABULARY = 512
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
GROUPED: Mapping[str, Any] = {**TEXT, "num_key_value_heads": 4}
IMAGE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}
EXPERTS: Mapping[str, Any] = {"num_experts_per_tok": 2, "_experts": "grouped_mm"}
LANGUAGE: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gpt2": (
        "GPT2",
        {"n_layer": 2, "n_head": 4, "n_embd": 64, "vocab_size": VOCABULARY, "n_positions": 64},
    ),
    "llama": ("Llama", GROUPED),
    "mistral": ("Mistral", {**GROUPED, "sliding_window": 8}),
    "qwen2": ("Qwen2", GROUPED),
    "qwen3": ("Qwen3", {**GROUPED, "head_dim": 8}),
    "gemma": ("Gemma", {**GROUPED, "head_dim": 8}),
    "opt": (
        "OPT",
        {
            "hidden_size": 64,
            "ffn_dim": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 8,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": 64,
            "word_embed_proj_dim": 64,
        },
    ),
    "gpt_neox": ("GPTNeoX", TEXT),
    "phi": ("Phi", TEXT),
    "bloom": ("Bloom", {"hidden_size": 64, "n_layer": 2, "n_head": 8, "vocab_size": VOCABULARY}),
    "mixtral": ("Mixtral", {**GROUPED, "num_local_experts": 4, **EXPERTS}),
    "qwen3_moe": (
        "Qwen3Moe",
        {**GROUPED, "head_dim": 8, "moe_intermediate_size": 32, "num_experts": 4, **EXPERTS},
    ),
    "mamba2": (
        "Mamba2",
        {
            "state_size": 16,
            "num_heads": 8,
            "head_dim": 16,
            "n_groups": 2,
            "chunk_size": 8,
            "expand": 2,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "vocab_size": VOCABULARY,
        },
    ),
}
"""Causal language models of transformers: the name of its classes, and sizes."""


class Called(nn.Module):
    """A model called with its tensors in order, that returns one of its outputs."""

    def __init__(self, model: nn.Module, names: str, output: str = "logits", **fixed: Any) -> None:
        super().__init__()
        self.model = model
        self.names = names.split()
        self.output = output
        self.fixed = fixed

    def forward(self, *tensors: Tensor) -> Tensor:
        """The named output."""
        output: Tensor = self.model(**dict(zip(self.names, tensors, strict=True)), **self.fixed)[
            self.output
        ]
        return output


def build(name: str) -> Built:
    """A model with the same weights each time, and a batch."""
    torch.manual_seed(0)
    if name not in LANGUAGE:
        return OTHERS[name]()
    called, sizes = LANGUAGE[name]
    library = import_module("transformers")
    sizes = dict(sizes)
    options = (
        {"experts_implementation": experts} if (experts := sizes.pop("_experts", None)) else {}
    )
    model = library.AutoModelForCausalLM.from_config(
        getattr(library, f"{called}Config")(**sizes), **options
    )
    return Called(model, "input_ids", use_cache=False), (tokens(),)


def tokens(length: int = LENGTH) -> Tensor:
    """A batch of texts."""
    return torch.randint(0, VOCABULARY, (BATCH, length))


def pictures(size: int = 32) -> Tensor:
    """A batch of pictures."""
    return torch.randn(BATCH, 3, size, size)


def bert() -> Built:
    """An encoder with a padding mask."""
    library = import_module("transformers")
    given = (
        tokens(),
        torch.ones(BATCH, LENGTH, dtype=torch.int64),
        torch.zeros(BATCH, LENGTH, dtype=torch.int64),
    )
    return Called(
        library.BertForMaskedLM(library.BertConfig(**TEXT)),
        "input_ids attention_mask token_type_ids",
    ), given


def t5() -> Built:
    """Encoder and decoder, relative positions."""
    library = import_module("transformers")
    config = library.T5Config(
        d_model=64, d_kv=8, d_ff=128, num_layers=2, num_heads=8, vocab_size=VOCABULARY
    )
    given = (tokens(), torch.ones(BATCH, LENGTH, dtype=torch.int64), tokens(8))
    return Called(
        library.T5ForConditionalGeneration(config),
        "input_ids attention_mask decoder_input_ids",
        use_cache=False,
    ), given


def vit() -> Built:
    """Patches by a convolution, a class token."""
    library = import_module("transformers")
    return Called(
        library.ViTForImageClassification(library.ViTConfig(**IMAGE, num_labels=16)), "pixel_values"
    ), (pictures(),)


def swin() -> Built:
    """Shifted windows: rolls and relative positions by a table."""
    library = import_module("transformers")
    config = library.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=32,
        depths=[2, 2],
        num_heads=[2, 4],
        window_size=4,
        num_labels=16,
    )
    return Called(library.SwinForImageClassification(config), "pixel_values"), (pictures(),)


def resnet() -> Built:
    """Convolutions, batch norms in inference form, pools."""
    library = import_module("transformers")
    config = library.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], num_labels=16
    )
    return Called(library.ResNetForImageClassification(config), "pixel_values"), (pictures(64),)


def clip() -> Built:
    """Two towers and a product of their ends."""
    library = import_module("transformers")
    text = {
        **TEXT,
        "max_position_embeddings": LENGTH,
        "eos_token_id": VOCABULARY - 1,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    model = library.CLIPModel(
        library.CLIPConfig(text_config=text, vision_config=dict(IMAGE), projection_dim=32)
    )
    given = (tokens(), pictures(), torch.ones(BATCH, LENGTH, dtype=torch.int64))
    return Called(model, "input_ids pixel_values attention_mask", "logits_per_image"), given


def unet() -> Built:
    """Convolutions, group norms, cross attention, skips and upsampling."""
    model = import_module("diffusers").UNet2DConditionModel(
        sample_size=16,
        in_channels=4,
        out_channels=4,
        block_out_channels=(32, 64),
        layers_per_block=1,
        cross_attention_dim=32,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=8,
        norm_num_groups=8,
    )
    given = (torch.randn(BATCH, 4, 16, 16), torch.full((BATCH,), 10), torch.randn(BATCH, 8, 32))
    return Called(model, "sample timestep encoder_hidden_states", "sample"), given


OTHERS: Mapping[str, Callable[[], Built]] = {
    made.__name__: made for made in (bert, t5, vit, swin, resnet, clip, unet)
}
MODELS = (*LANGUAGE, *OTHERS)
"""All names."""
