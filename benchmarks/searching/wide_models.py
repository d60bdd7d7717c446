"""Models of transformers whose graphs are wide, of a few layers and small sizes.

A window of attention rolls, cuts and joins its image, so that more values live side by side; so do
the states of a hybrid beside its experts.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from autopar.ir import Graph

from .models import Model, quiet

BATCH = 16


def wide() -> list[Model]:
    """Vision with shifted windows and with windows between global layers, and a hybrid."""
    made = {"swin": _swin, "sam": _sam, "jamba": _jamba}
    return [Model(name=name, load=partial(_loaded, make)) for name, make in made.items()]


def _loaded(make: Any) -> Graph:
    from autopar.frontends.torch import import_torch
    from autopar.ir import with_loss

    with quiet():
        module, inputs = make()
        return with_loss(import_torch(module.eval(), inputs).graph)


def _first(model: Any, name: str) -> Any:
    """A module from one input to the model's first output."""
    import torch

    class First(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, given: torch.Tensor) -> Any:
            return self.model(**{name: given})[0]

    return First()


def _swin() -> tuple[Any, tuple[Any, ...]]:
    import torch
    from transformers import SwinConfig, SwinModel

    configuration = SwinConfig(
        image_size=64, patch_size=4, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return _first(SwinModel(configuration), "pixel_values"), (torch.zeros(BATCH, 3, 64, 64),)


def _sam() -> tuple[Any, tuple[Any, ...]]:
    import torch
    from transformers import SamVisionConfig, SamVisionModel

    configuration = SamVisionConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        image_size=128,
        patch_size=16,
        window_size=4,
        global_attn_indexes=[1, 3],
        mlp_dim=128,
        output_channels=32,
    )
    return _first(SamVisionModel(configuration), "pixel_values"), (torch.zeros(BATCH, 3, 128, 128),)


def _jamba() -> tuple[Any, tuple[Any, ...]]:
    import torch
    from transformers import JambaConfig, JambaForCausalLM

    configuration = JambaConfig(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        attn_layer_period=4,
        attn_layer_offset=2,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_cache=False,
        experts_implementation="grouped_mm",
    )
    return _first(JambaForCausalLM(configuration), "input_ids"), (
        torch.zeros(BATCH, 16, dtype=torch.int64),
    )
