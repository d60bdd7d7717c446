"""A model that puts features of images in the place of image tokens, and asserts that there are as
many of both.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

IMAGE = 9
WIDTH = 8


class Counting(nn.Module):
    """Embeds tokens, `IMAGE` among them as the features of images, and computes a layer of all."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(IMAGE + 1, WIDTH)
        self.project = nn.Linear(4, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids: Tensor, images: Tensor) -> Tensor:
        """`ids`: [samples, tokens]; `images`: [samples, patches, 4]."""
        features = self.project(images)
        mask = ids == IMAGE
        torch._check((mask.sum() * WIDTH == features.numel()).item())
        mixed = self.embed(ids).masked_scatter(mask.unsqueeze(-1).expand(-1, -1, WIDTH), features)
        made: Tensor = self.head(mixed)
        return made


def example(tokens: int = 3) -> tuple[Tensor, Tensor]:
    """Four samples of twelve tokens, `tokens` of which are of an image with three patches."""
    ids = torch.arange(48).reshape(4, 12) % IMAGE
    ids[:, 2 : 2 + tokens] = IMAGE
    return ids, torch.linspace(-1.0, 1.0, 48).reshape(4, 3, 4)
