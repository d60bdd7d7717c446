"""Tokens of a text with images: a place for every row of features that the images become."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import ModelError, UsageError

from .made import Configured, first_line

TOKENS = "input_ids"
IMAGES = "pixel_values"


def placed(model: Configured, given: Mapping[str, Any]) -> dict[str, Any]:
    """The tokens, with values: those of images come first in each sample, all others are equal.

    Empty where the inputs are no texts with images.
    """
    import torch

    if not {TOKENS, IMAGES} <= set(given):
        return {}
    samples, sequence = given[TOKENS].shape
    rows = _rows(model, given[IMAGES]) // samples
    if rows > sequence:
        raise UsageError(f"--seq is {sequence}, and the image of a sample alone has {rows} tokens")
    names = ("image_token_id", "image_token_index")
    mark = next((mark for name in names if (mark := getattr(model.config, name, None))), None)
    if mark is None:
        raise ModelError(f"{type(model.module).__name__}: its configuration has no {names[0]}")
    tokens = torch.zeros((samples, sequence), dtype=torch.long)
    tokens[:, :rows] = mark
    return {TOKENS: tokens}


def _rows(model: Configured, images: Any) -> int:
    """The rows of features that all images become."""
    import torch

    try:
        with torch.no_grad():
            made = model.module.get_image_features(pixel_values=images, return_dict=True)
    except Exception as error:  # whatever the type's own code says of an image's sizes
        name = type(model.module).__name__
        raise ModelError(f"{name} takes no images of this size: {first_line(error)}") from error
    features = getattr(made, "pooler_output", made)
    parts = [features] if isinstance(features, torch.Tensor) else features
    return sum(part.numel() // part.shape[-1] for part in parts)
