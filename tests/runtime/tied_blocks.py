"""Residual blocks between an embedding and its transpose, and tokens for them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TiedBlocks(nn.Module):
    """So many residual blocks between an embedding and its transpose; the output is the loss."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
            for _ in range(blocks)
        )
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """The loss."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def tied_blocks(blocks: int) -> TiedBlocks:
    """The blocks in float64, the same every time."""
    torch.manual_seed(0)
    return TiedBlocks(blocks).double()


def tokens() -> Tensor:
    """The same eight sequences every time."""
    return torch.randint(0, 32, (8, 8), generator=torch.Generator().manual_seed(1))
