"""GPT-2 in plain torch, without dropout, and its stages for a pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD = 64
"""Width of an attention head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of the model and of its batch."""

    width: int
    layers: int
    batch: int = 8
    sequence: int = 64
    vocabulary: int = 4096
    family: str = "gpt2"


class Block(nn.Module):
    """Attention and feed-forward, each with a norm and a residual.

    Separate projections, so each can be split.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        h = self.norm1(x)
        # -1: under tensor parallelism a rank has some of the heads.
        q, k, v = (
            part(h).view(*h.shape[:2], -1, HEAD).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        x = x + self.out(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        )
        output: Tensor = x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))
        return output


class Embedding(nn.Module):
    """Tokens and positions."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.sequence, shape.width)

    def forward(self, tokens: Tensor) -> Tensor:
        """The sum of both embeddings."""
        embedded: Tensor = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return embedded


class Gpt2(nn.Module):
    """The model with its mean cross entropy.

    The head is not tied, since stages of a pipeline cannot share a tensor.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = Embedding(shape)
        self.blocks = nn.ModuleList(Block(shape.width) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The loss."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return cross_entropy(self.head(self.norm(x)), targets)

    def stage(self, index: int, count: int) -> nn.Sequential:
        """The modules of one of `count` equal stages.

        The first also has the embedding, the last the head.
        """
        size = len(self.blocks) // count
        parts: list[nn.Module] = list(self.blocks)[index * size : (index + 1) * size]
        first = [self.embedding] if index == 0 else []
        last = [self.norm, self.head] if index == count - 1 else []
        return nn.Sequential(*first, *parts, *last)


def cross_entropy(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean over all tokens."""
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def batch(shape: Shape, step: int = 0) -> tuple[Tensor, Tensor]:
    """The tokens of a step, and the next tokens."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.randint(
        0, shape.vocabulary, (shape.batch, shape.sequence + 1), generator=generator
    )
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
