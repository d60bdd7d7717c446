"""Example inputs of diffusion's transformers: each argument of the signature has a shape."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from autopar.errors import ModelError

from .made import Configured
from .sizes import FRAMES, IMAGE, SEQUENCE, Sizes

IMAGE_SIDE = 128
"""Sides of a latent where the configuration has none: that of 1,024 pixels, 8 to each of its places
(the autoencoders of Stable Diffusion 3 and FLUX)."""
VIDEO_SIDE = 64
"""Sides of a frame's latent where the configuration has none: that of 512 pixels."""
VIDEO_FRAMES = 21
"""Frames of a video's latent: 81 frames, of which the first is alone and 4 are one (Wan 2.1)."""
TEXT = 512
"""Tokens of a text (`max_sequence_length` of the pipelines of FLUX and Wan in diffusers)."""
_PACKED = 2
"""Places of a latent along each side of one token, where a pipeline packs them (FLUX)."""
_TEXT_WIDTHS = (
    "joint_attention_dim",
    "text_dim",
    "text_embed_dim",
    "caption_channels",
    "cap_feat_dim",
    "cross_attention_dim",
)
"""Keys of the width of a text's values, the first that is there counting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Batch:
    """A batch of `samples`; `packed`: whether the pipeline makes tokens of the latent."""

    config: Mapping[str, Any]
    samples: int
    sizes: Sizes
    packed: bool
    video: bool

    @property
    def side(self) -> int:
        own = self.config.get("sample_size") or (VIDEO_SIDE if self.video else IMAGE_SIDE)
        return self.sizes.asked(IMAGE) or int(own)

    @property
    def text(self) -> int:
        return self.sizes.asked(SEQUENCE) or TEXT

    @property
    def places(self) -> int:
        """Tokens of a packed latent."""
        return (self.side // _PACKED) ** 2

    def latent(self) -> tuple[int, ...]:
        channels = self.config["in_channels"]
        if self.packed:
            return (self.samples, self.places, channels)
        if self.video:
            frames = self.sizes.asked(FRAMES) or VIDEO_FRAMES
            return (self.samples, channels, frames, self.side, self.side)
        return (self.samples, channels, self.side, self.side)

    def of_text(self) -> tuple[int, ...]:
        width = next((size for key in _TEXT_WIDTHS if (size := self.config.get(key))), None)
        if width is None:
            raise ModelError(f"no width of a text is among its keys: {', '.join(_TEXT_WIDTHS)}")
        return (self.samples, self.text, width)

    def places_of(self, tokens: int) -> tuple[int, ...]:
        """A place in each of the axes that positions turn by, for each token."""
        return (tokens, len(self.config["axes_dims_rope"]))


_SHAPES: Mapping[str, Callable[[_Batch], tuple[int, ...]]] = {
    "hidden_states": _Batch.latent,
    "encoder_hidden_states": _Batch.of_text,
    "pooled_projections": lambda batch: (batch.samples, batch.config["pooled_projection_dim"]),
    "timestep": lambda batch: (batch.samples,),
    "guidance": lambda batch: (batch.samples,),
    "class_labels": lambda batch: (batch.samples,),
    "img_ids": lambda batch: batch.places_of(batch.places),
    "txt_ids": lambda batch: batch.places_of(batch.text),
    "original_size": lambda batch: (batch.samples, 2),
    "target_size": lambda batch: (batch.samples, 2),
    "crop_coords": lambda batch: (batch.samples, 2),
}
"""Shapes of the arguments that are made."""
_WHOLE_NUMBERS = frozenset({"class_labels"})


def inputs(model: Configured, batch: int, sizes: Sizes) -> dict[str, Any]:
    """Tensors on the meta device, by argument; raises `ModelError` for an argument of no shape."""
    import torch

    taken = inspect.signature(model.module.forward).parameters
    made = _Batch(
        config=model.config,
        samples=batch,
        sizes=sizes,
        packed="img_ids" in taken,
        video="3D" in model.kind,
    )
    missing = [
        name
        for name, parameter in taken.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        and name not in _SHAPES
    ]
    if missing:
        raise ModelError(
            f"{model.kind} needs {', '.join(missing)}, for which no shapes are known; "
            f"arguments with shapes are {', '.join(_SHAPES)}"
        )
    given = {}
    for name in _needed(taken, model.config):
        dtype = torch.long if name in _WHOLE_NUMBERS else model.module.dtype
        given[name] = torch.zeros(_SHAPES[name](made), dtype=dtype, device="meta")
    return given


def _needed(taken: Mapping[str, Any], config: Mapping[str, Any]) -> list[str]:
    """The arguments of a class that its configuration uses."""
    unused = set()
    if not config.get("guidance_embeds"):
        unused.add("guidance")
    return [name for name in _SHAPES if name in taken and name not in unused]
