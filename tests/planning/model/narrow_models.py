"""Small models with products that may be narrow."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu


class Block(nn.Module):
    """A normalised feed-forward part with a residual."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """x + down(gelu(up(norm(x))))."""
        out: Tensor = x + self.down(gelu(self.up(self.norm(x))))
        return out


def blocks(hidden: int = 256, width: int = 1024) -> nn.Module:
    """Two blocks and a head."""
    torch.manual_seed(0)
    return nn.Sequential(Block(hidden, width), Block(hidden, width), nn.Linear(hidden, 512))


class Stored(nn.Module):
    """A feed-forward part that reads its first matrix [in, out] and its second turned."""

    def __init__(self, hidden: int = 256, width: int = 512) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Parameter(torch.randn(hidden, width) / hidden**0.5)
        self.bias = nn.Parameter(torch.randn(width))
        self.down = nn.Parameter(torch.randn(hidden, width) / width**0.5)
        self.mixed = nn.Parameter(torch.randn(hidden, hidden) / hidden**0.5)
        self.head = nn.Linear(hidden, 512)

    def forward(self, x: Tensor) -> Tensor:
        """As GPT-2's `Conv1D` and programs of core operators have it."""
        rows = torch.addmm(self.bias, self.norm(x).flatten(0, -2), self.up)
        made = torch.mm(gelu(rows), self.down.t()).view_as(x)
        out: Tensor = self.head(x + gelu(made @ self.mixed))
        return out


def example(hidden: int = 256) -> tuple[Tensor]:
    """A batch of 8 sequences of 128 rows."""
    return (torch.randn(8, 128, hidden, generator=torch.Generator().manual_seed(0)),)


class Routed(nn.Module):
    """Two products of the same values, weighed by a router's best score."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(64, 64)
        self.right = nn.Linear(64, 64)
        self.router = nn.Linear(64, 16)
        self.out = nn.Linear(64, 64)
        self.head = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        """The head of the weighed products."""
        score = self.router(x).softmax(-1).topk(1, -1).values
        out: Tensor = self.head(self.out(gelu(self.left(x) * self.right(x) * score)))
        return out
