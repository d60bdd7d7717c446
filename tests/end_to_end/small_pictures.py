"""Narrow vision-language models with a batch of prompts, each with an image of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.end_to_end.small_types import small_configuration

BATCH = 8
SEQUENCE = 24
SIDE = 32
PATCH = 8
IMAGE = 99
"""The number of an image token; words are below."""
_CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": PATCH,
    "projection_dim": 32,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pictured:
    """A type: image tokens of a prompt, keys in which its configuration and that of its vision
    differ from the sizes of `small_types`, and whether its images come as rows of patches.
    """

    tokens: int
    keys: Mapping[str, Any] = field(default_factory=dict)
    vision: Mapping[str, Any] = field(default_factory=dict)
    text: Mapping[str, Any] = field(default_factory=dict)
    patches: bool = False


PICTURED: Mapping[str, Pictured] = {
    "llava": Pictured(
        tokens=16, keys={"image_token_index": IMAGE, "image_seq_length": 16}, vision=_CLIP
    ),
    "gemma3": Pictured(
        tokens=4,
        keys={"image_token_index": IMAGE, "image_token_id": IMAGE, "mm_tokens_per_image": 4},
    ),
    "internvl": Pictured(
        tokens=4,
        keys={"image_token_id": IMAGE, "image_seq_length": 4},
        vision={"image_size": [SIDE, SIDE], "patch_size": [PATCH, PATCH], "hidden_size": 32},
    ),
    "qwen2_vl": Pictured(
        tokens=4,
        keys={"image_token_id": IMAGE, "vision_start_token_id": 97, "video_token_id": 98},
        vision={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        text={
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
            }
        },
        patches=True,
    ),
}
"""Types whose code takes images, one way to give them each."""


class Gridded(nn.Module):
    """A model that is told the sizes of its images, which are those of a batch for ever."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **given: Tensor) -> Any:
        """As the model; each image is a square of patches."""
        rows = SIDE // PATCH
        return self.model(**given, image_grid_thw=torch.tensor([[1, rows, rows]] * BATCH))


def pictured(kind: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in double precision, and its inputs by argument."""
    from transformers import AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    row = PICTURED[kind]
    keys = {**small_configuration(kind), **row.keys}
    keys["vision_config"] = {**keys["vision_config"], **row.vision}
    keys["text_config"] = {**keys["text_config"], **row.text}
    config = CONFIG_MAPPING[kind].from_dict(keys)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = AutoModelForImageTextToText.from_config(config, dtype=torch.float64).train()
        ids = torch.randint(3, 97, (BATCH, SEQUENCE))
        ids[:, 2 : 2 + row.tokens] = IMAGE
        inputs = {"input_ids": ids, "labels": ids}
        if row.patches:
            width = 2 * 3 * PATCH**2
            inputs["pixel_values"] = torch.randn(
                BATCH * (SIDE // PATCH) ** 2, width, dtype=torch.float64
            )
            inputs["position_ids"] = torch.arange(SEQUENCE).expand(3, BATCH, -1).clone()
            return Gridded(module), inputs
        inputs["pixel_values"] = torch.randn(BATCH, 3, SIDE, SIDE, dtype=torch.float64)
    if kind == "gemma3":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    return module, inputs


def misplaced(inputs: Mapping[str, Tensor], tokens: int) -> dict[str, Tensor]:
    """The inputs with the image tokens of the last prompt moved to the first one."""
    ids = inputs["input_ids"].clone()
    ids[-1, 2 : 2 + tokens] = 3
    ids[0, 2 : 2 + 2 * tokens] = IMAGE
    return {**inputs, "input_ids": ids}
