"""Small configurations of thirteen architectures that people train: language, vision, both,
diffusion, state space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.convertible.models import Called

Built = tuple[nn.Module, tuple[Tensor, ...]]
VOCABULARY = 512
TEXT: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": VOCABULARY,
}
IMAGE: Mapping[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


def tokens(length: int = 16) -> Tensor:
    """A batch of two texts."""
    return torch.randint(0, VOCABULARY, (2, length))


def language_model(name: str, **sizes: Any) -> Built:
    """A causal language model of transformers by the name of its classes."""
    library = import_module("transformers")
    config = getattr(library, f"{name}Config")(**sizes)
    options = {"experts_implementation": "grouped_mm"} if "num_local_experts" in sizes else {}
    return Called(
        library.AutoModelForCausalLM.from_config(config, **options), "input_ids", use_cache=False
    ), (tokens(),)


def gpt2() -> Built:
    """Fused projections, learned positions, a tied output."""
    return language_model(
        "GPT2", n_layer=2, n_head=4, n_embd=64, vocab_size=VOCABULARY, n_positions=64
    )


def llama() -> Built:
    """Grouped queries, rotary positions."""
    return language_model("Llama", **TEXT, num_key_value_heads=4)


def mistral() -> Built:
    """Llama with a window of attention."""
    return language_model("Mistral", **TEXT, num_key_value_heads=4, sliding_window=8)


def mixtral() -> Built:
    """A mixture of experts."""
    return language_model(
        "Mixtral", **TEXT, num_key_value_heads=4, num_local_experts=4, num_experts_per_tok=2
    )


def mamba2() -> Built:
    """A chunked state-space scan."""
    sizes = {
        "state_size": 16,
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 2,
        "chunk_size": 8,
        "expand": 2,
    }
    return language_model(
        "Mamba2", hidden_size=64, num_hidden_layers=2, vocab_size=VOCABULARY, **sizes
    )


def bert() -> Built:
    """An encoder with a padding mask."""
    library = import_module("transformers")
    model = library.BertForMaskedLM(library.BertConfig(**TEXT))
    names = "input_ids attention_mask token_type_ids"
    return Called(model, names), (
        tokens(),
        torch.ones(2, 16, dtype=torch.int64),
        torch.zeros(2, 16, dtype=torch.int64),
    )


def t5() -> Built:
    """Encoder and decoder, relative positions."""
    library = import_module("transformers")
    model = library.T5ForConditionalGeneration(
        library.T5Config(
            d_model=64, d_kv=8, d_ff=128, num_layers=2, num_heads=8, vocab_size=VOCABULARY
        )
    )
    given = (tokens(), torch.ones(2, 16, dtype=torch.int64), tokens(8))
    return Called(model, "input_ids attention_mask decoder_input_ids", use_cache=False), given


def vit() -> Built:
    """Patches by a convolution, a class token."""
    library = import_module("transformers")
    return Called(
        library.ViTForImageClassification(library.ViTConfig(**IMAGE, num_labels=16)), "pixel_values"
    ), (torch.randn(2, 3, 32, 32),)


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
    return Called(library.SwinForImageClassification(config), "pixel_values"), (
        torch.randn(2, 3, 32, 32),
    )


def resnet() -> Built:
    """Convolutions, batch norms in inference form, pools."""
    library = import_module("transformers")
    config = library.ResNetConfig(
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[1, 1, 1, 1], num_labels=16
    )
    return Called(library.ResNetForImageClassification(config), "pixel_values"), (
        torch.randn(2, 3, 64, 64),
    )


def clip() -> Built:
    """Two towers and a product of their ends."""
    library = import_module("transformers")
    text = {
        **TEXT,
        "max_position_embeddings": 16,
        "eos_token_id": 511,
        "bos_token_id": 1,
        "pad_token_id": 0,
    }
    model = library.CLIPModel(
        library.CLIPConfig(text_config=text, vision_config=dict(IMAGE), projection_dim=32)
    )
    given = (tokens(), torch.randn(2, 3, 32, 32), torch.ones(2, 16, dtype=torch.int64))
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
    given = (torch.randn(2, 4, 16, 16), torch.full((2,), 10), torch.randn(2, 8, 32))
    return Called(model, "sample timestep encoder_hidden_states", "sample"), given


class _Transformer(nn.Module):
    """torch's own encoder and decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(64, 4, 2, 2, 128, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """The decoder's output."""
        output: Tensor = self.inner(source, target)
        return output


def torch_transformer() -> Built:
    """torch's own encoder and decoder."""
    return _Transformer(), (torch.randn(2, 16, 64), torch.randn(2, 16, 64))


ARCHITECTURES: Mapping[str, Callable[[], Built]] = {
    build.__name__: build
    for build in (
        gpt2,
        llama,
        mistral,
        mixtral,
        mamba2,
        bert,
        t5,
        vit,
        swin,
        resnet,
        clip,
        unet,
        torch_transformer,
    )
}
