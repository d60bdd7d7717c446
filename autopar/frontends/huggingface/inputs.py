"""Example inputs that fit a configured module: tokens, images or sounds, and labels."""

from __future__ import annotations

from typing import Any

from autopar.errors import UsageError

from .modules import Configured

SEQUENCE = "sequence"
"""The dim that `--seq` sizes."""
DEFAULT_SEQUENCE = 4096
"""Tokens of a sequence where none are asked for, if the positions allow as many."""


def example_inputs(
    model: Configured, batch: int, sequence: int | None, *, labels: bool = True
) -> dict[str, Any]:
    """Tensors on the meta device, by argument: `batch` samples.

    `labels`: those of the samples, too, where the module takes some and makes a loss of them.
    """
    labels = labels and model.task != "AutoModel"
    if model.task in ("AutoModelForImageClassification", "AutoModel") and _takes_images(model):
        return _images(model, batch, labels)
    tokens = _tokens(batch, _length(model, sequence))
    given = {"input_ids": tokens}
    if model.task == "AutoModelForSpeechSeq2Seq":
        given = {"input_features": _sounds(model, batch)}
    if labels:
        given["labels"] = tokens
    return given


def _tokens(batch: int, sequence: int) -> Any:
    import torch

    return torch.zeros((batch, sequence), dtype=torch.long, device="meta")


def _length(model: Configured, asked: int | None) -> int:
    text = model.config.get_text_config()
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
    most = next((v for n in names if isinstance(v := getattr(text, n, None), int) and v > 0), None)
    if asked is not None and asked < 1:
        raise UsageError(f"--seq is {asked}; it must be at least 1")
    learned = any(
        part in name
        for name, _ in model.module.named_parameters()
        for part in ("embed_positions.", "position_embeddings.", "wpe.")
    )
    if asked is not None and most is not None and learned and asked > most:
        raise UsageError(f"--seq is {asked}; {type(model.module).__name__} has {most} positions")
    return asked or min(DEFAULT_SEQUENCE, most or DEFAULT_SEQUENCE)


def _takes_images(model: Configured) -> bool:
    return getattr(model.module, "main_input_name", "") == "pixel_values"


def _images(model: Configured, batch: int, labels: bool) -> dict[str, Any]:
    import torch

    size = getattr(model.config, "image_size", 224)
    sizes = tuple(size) if isinstance(size, (list, tuple)) else (size, size)
    shape = (batch, getattr(model.config, "num_channels", 3), *sizes)
    images = torch.zeros(shape, dtype=model.module.dtype, device="meta")
    if not labels:
        return {"pixel_values": images}
    return {
        "pixel_values": images,
        "labels": torch.zeros((batch,), dtype=torch.long, device="meta"),
    }


def _sounds(model: Configured, batch: int) -> Any:
    import torch

    frames = 2 * model.config.max_source_positions
    shape = (batch, model.config.num_mel_bins, frames)
    return torch.zeros(shape, dtype=model.module.dtype, device="meta")
