"""Images of a batch, in the form that a type's arguments ask for, and the sizes that it is told.

Code that is told the sizes of images in a tensor makes its shapes of them. So they are no input:
all images have one size, and its numbers are constants of the plan.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any

from autopar.errors import ModelError, UsageError

from .made import Configured

TOKENS = "input_ids"
PIXELS = "pixel_values"

GRIDS = "image_grid_thw"
"""The argument with the patches of each image: frames, rows and columns."""
SIZES = "image_sizes"
"""The argument with the height and width of each image."""
SHAPES = "spatial_shapes"
"""The argument with the rows and columns of patches of each image, which are a sequence then."""
PADDED = "pixel_attention_mask"
"""An argument of types that take as many images a text as any has, behind the batch's dim."""


def shape_of_images(
    model: Configured, takes: Collection[str], leading: tuple[int, ...], sides: tuple[int, int]
) -> tuple[int, ...]:
    """The shape of images of one size; `leading`: the batch, and the frames of a video."""
    config = getattr(model.config, "vision_config", model.config)
    channels = _first(config, ("num_channels", "in_channels", "in_chans"), 3)
    if GRIDS in takes:
        patch = config.patch_size
        _require_squares(model, sides, patch * getattr(config, "spatial_merge_size", 1))
        rows, columns = (side // patch for side in sides)
        width = channels * getattr(config, "temporal_patch_size", 1) * patch**2
        return (leading[0] * rows * columns, width)
    if SHAPES in takes:
        _require_squares(model, sides, config.patch_size)
        rows, columns = (side // config.patch_size for side in sides)
        return (*leading, rows * columns, channels * config.patch_size**2)
    if PADDED in takes:
        return (*leading, 1, channels, *sides)
    return (*leading, channels, *sides)


def told_sizes(model: Configured, given: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of the images that are given, where the model's code is told some beside them."""
    import torch

    takes = inspect.signature(model.module.forward).parameters
    if PIXELS not in given:
        return {}
    pixels = given[PIXELS]
    if GRIDS in takes and GRIDS not in given:
        samples = given.get(TOKENS, pixels).shape[0]
        side = math.isqrt(pixels.shape[0] // samples)
        if side**2 * samples != pixels.shape[0]:
            raise ModelError(f"{PIXELS}: {pixels.shape[0]} patches are no {samples} square images")
        return {GRIDS: torch.tensor([[1, side, side]] * samples)}
    if SHAPES in takes and SHAPES not in given:
        side = math.isqrt(pixels.shape[1])
        if side**2 != pixels.shape[1]:
            raise ModelError(f"{PIXELS}: {pixels.shape[1]} patches are no square image")
        return {SHAPES: torch.tensor([[side, side]] * pixels.shape[0])}
    if SIZES in takes and SIZES not in given and _tower_takes(model.module, SIZES):
        return {SIZES: torch.tensor([list(pixels.shape[-2:])] * pixels.shape[0])}
    return {}


def _tower_takes(module: Any, argument: str) -> bool:
    """Whether a part of the model takes an argument, and not only hands it on."""
    parts = getattr(module, "base_model", module).children()
    return any(argument in inspect.signature(part.forward).parameters for part in parts)


def telling(module: Any, told: Mapping[str, Any]) -> Any:
    """The module, whose every call is told the values of these arguments too."""
    if told:
        module.register_forward_pre_hook(partial(_tell, dict(told)), with_kwargs=True)
    return module


def _tell(told: Mapping[str, Any], module: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return args, {**kwargs, **told}


def _require_squares(model: Configured, sides: tuple[int, int], unit: int) -> None:
    if any(side % unit for side in sides):
        name = type(model.module).__name__
        raise UsageError(f"--image is {sides[0]}; an image of {name} is cut into squares of {unit}")


def _first(config: Any, names: tuple[str, ...], default: int) -> int:
    return next((value for name in names if (value := getattr(config, name, None))), default)
