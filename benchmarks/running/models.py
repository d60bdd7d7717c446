"""The models that are raced, by their family."""

from __future__ import annotations

import torch

from .gpt2 import Gpt2, Shape
from .llama import Llama

FAMILIES: dict[str, type[Gpt2]] = {"gpt2": Gpt2, "llama": Llama}


def model(shape: Shape) -> Gpt2:
    """The model with weights drawn from a seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FAMILIES[shape.family](shape)
