"""Example inputs that fit a configured module: tokens, images or sounds, and labels."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.errors import UsageError

from . import diffusion, diffusion_inputs
from .image_tokens import AXES, PLACES, has_places
from .images import GRIDS, PIXELS, TOKENS, shape_of_images
from .made import Configured
from .sizes import FRAMES, IMAGE, SEQUENCE, Sizes

DEFAULT_SEQUENCE = 4096
"""Tokens of a sequence where none are asked for, if the positions allow as many."""
DEFAULT_IMAGE = 224
"""Sides of an image where the configuration has none (the crops of ImageNet's training)."""
DEFAULT_FRAMES = 3000
"""Frames of a sound where the configuration has no number: 30 s, one every 10 ms (Whisper's)."""
DEFAULT_BANDS = 80
"""Bands of a spectrum where the configuration has no number (Whisper's)."""
DEFAULT_SAMPLES = 250_000
"""Samples of a raw sound: the crops that wav2vec 2.0 is trained on (arXiv:2006.11477)."""
_OF_CLASSES = "Classification"
"""The part of a task's name that tells one label for each sample."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Tensors on the meta device, by argument, and the spelling of the options that size them."""

    given: Mapping[str, Any]
    options: tuple[str, ...] = ()


def example_inputs(
    model: Configured, batch: int, asked: Mapping[str, int], *, labels: bool = True
) -> Batch:
    """A batch of so many samples.

    `asked`: sizes by the names of `sizes.OPTIONS`. `labels`: those of the samples, too, where the
    module takes some and makes a loss of them.
    """
    sizes = Sizes(asked, type(model.module).__name__)
    made = batch_of(model, batch, sizes, labels=labels)
    sizes.require_used()
    return replace(made, options=tuple(sizes.used))


def batch_of(model: Configured, batch: int, sizes: Sizes, *, labels: bool) -> Batch:
    """`example_inputs`, where sizes may be asked for of what a batch does not have."""
    if model.project == diffusion.PROJECT:
        return Batch(given=diffusion_inputs.inputs(model, batch, sizes))
    takes = inspect.signature(model.module.forward).parameters
    main = getattr(model.module, "main_input_name", "input_ids")
    given = {}
    if main == PIXELS or (PIXELS in takes and sizes.has(IMAGE)):
        given[PIXELS] = _images(model, takes, batch, sizes)
    elif PIXELS in takes:
        sizes.offer(IMAGE, "an image of each text")
    if main == "input_features":
        given["input_features"] = _sounds(model, batch, sizes)
    if main == "input_values":
        given["input_values"] = _waves(model, batch, sizes)
    labels = labels and "labels" in takes
    if _OF_CLASSES in model.task:
        return Batch(given={**given, **({"labels": _whole(batch)} if labels else {})})
    names = _names_of_tokens(model, takes, main, given, labels=labels)
    tokens = _whole(batch, _length(model, sizes)) if names else None
    given = {**dict.fromkeys(names, tokens), **given}
    if {GRIDS, PLACES} <= set(takes) and {TOKENS, PIXELS} <= set(given) and has_places(model):
        given[PLACES] = _whole(AXES, *given[TOKENS].shape)
    return Batch(given=given)


def _names_of_tokens(
    model: Configured, takes: Collection[str], main: str, given: Collection[str], *, labels: bool
) -> list[str]:
    """The arguments with tokens: the decoder's tokens are the labels, moved by one."""
    if model.task == "AutoModel" and given:
        return []
    whole = getattr(model.config, "is_encoder_decoder", False)
    names = ["input_ids"] if main == "input_ids" or not (whole or given) else []
    names += ["decoder_input_ids"] if whole and not labels and "decoder_input_ids" in takes else []
    return names + (["labels"] if labels else [])


def _whole(*shape: int) -> Any:
    import torch

    return torch.zeros(shape, dtype=torch.long, device="meta")


def _values(model: Configured, *shape: int) -> Any:
    import torch

    return torch.zeros(shape, dtype=model.module.dtype, device="meta")


def _length(model: Configured, sizes: Sizes) -> int:
    text = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
    most = next((v for n in names if isinstance(v := getattr(text, n, None), int) and v > 0), None)
    asked = sizes.asked(SEQUENCE)
    learned = any(
        part in name
        for name, _ in model.module.named_parameters()
        for part in ("embed_positions.", "position_embeddings.", "wpe.")
        if "vision" not in name
    )
    if asked is not None and most is not None and learned and asked > most:
        raise UsageError(f"--seq is {asked}; {type(model.module).__name__} has {most} positions")
    return asked or min(DEFAULT_SEQUENCE, most or DEFAULT_SEQUENCE)


def _sides(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return int(height), int(width)


def _images(model: Configured, takes: Collection[str], batch: int, sizes: Sizes) -> Any:
    """Images of the configuration's own size, or videos where it has a number of frames."""
    config = getattr(model.config, "vision_config", model.config)
    own = getattr(config, "image_size", None) or DEFAULT_IMAGE
    sides = _sides(sizes.asked(IMAGE) or own)
    frames = getattr(config, "num_frames", None)
    of_video = () if frames is None else (sizes.asked(FRAMES) or frames,)
    return _values(model, *shape_of_images(model, takes, (batch, *of_video), sides))


def _sounds(model: Configured, batch: int, sizes: Sizes) -> Any:
    """Spectra: frames behind the bands where an encoder halves them, else bands behind frames."""
    config = getattr(model.config, "audio_config", model.config)
    most: int | None = getattr(config, "max_source_positions", None)
    bands: int | None = getattr(config, "num_mel_bins", None)
    if bands is not None and most is not None:
        return _values(model, batch, bands, sizes.asked(FRAMES) or 2 * most)
    frames = sizes.asked(FRAMES) or most or DEFAULT_FRAMES
    own = getattr(config, "input_feat_per_channel", DEFAULT_BANDS)
    return _values(model, batch, frames, own if bands is None else bands)


def _waves(model: Configured, batch: int, sizes: Sizes) -> Any:
    """Samples of a sound, or its spectrum where the configuration has bands."""
    asked = sizes.asked(FRAMES)
    if (bands := getattr(model.config, "num_mel_bins", None)) is not None:
        most = getattr(model.config, "max_length", DEFAULT_FRAMES)
        return _values(model, batch, asked or most, bands)
    return _values(model, batch, asked or DEFAULT_SAMPLES)
