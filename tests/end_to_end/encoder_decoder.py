"""A small encoder and decoder in plain torch, with what T5 has of values that many layers read."""

from __future__ import annotations

import torch
from torch import nn

DROPPED = 0.1
"""How often dropout drops."""


class _Attending(nn.Module):
    """Attention with a bias by distance as in T5, of a sequence to itself or to another one."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (
            nn.Linear(width, width, bias=False) for _ in range(4)
        )

    def forward(
        self, x: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Attend from `x` to the other sequence."""
        shape = (x.shape[0], -1, self.heads, x.shape[-1] // self.heads)
        query, key, value = (
            f(of).view(shape).transpose(1, 2)
            for f, of in ((self.query, x), (self.key, other), (self.value, other))
        )
        scores = query @ key.transpose(-1, -2)
        weights = (scores if bias is None else scores + bias).softmax(-1)
        read: torch.Tensor = self.out((weights @ value).transpose(1, 2).reshape(x.shape))
        return read


class _Layer(nn.Module):
    """A layer of the encoder, or with `crossed` of the decoder."""

    def __init__(self, width: int, heads: int, *, crossed: bool) -> None:
        super().__init__()
        self.own = _Attending(width, heads)
        self.cross = _Attending(width, heads) if crossed else None
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(3))
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.drop = nn.Dropout(DROPPED)

    def forward(
        self, x: torch.Tensor, bias: torch.Tensor, other: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The residual stream behind it."""
        normed = self.norms[0](x)
        x = x + self.drop(self.own(normed, normed, bias))
        if self.cross is not None and other is not None:
            x = x + self.drop(self.cross(self.norms[1](x), other, None))
        after: torch.Tensor = x + self.drop(self.down(self.drop(self.up(self.norms[2](x)).relu())))
        return after


class EncoderDecoder(nn.Module):
    """As T5: one table for both sequences and the head, biases by distance that all layers share,
    an output that decoder layers read.
    """

    def __init__(
        self, vocabulary: int, length: int, *, width: int = 32, heads: int = 4, layers: int = 2
    ) -> None:
        super().__init__()
        self.shared = nn.Embedding(vocabulary, width)
        self.encoder = nn.ModuleList(_Layer(width, heads, crossed=False) for _ in range(layers))
        self.decoder = nn.ModuleList(_Layer(width, heads, crossed=True) for _ in range(layers))
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.distances = nn.Embedding(2 * length, heads)
        self.steps = nn.Embedding(2 * length, heads)

    @staticmethod
    def _bias(table: nn.Embedding, length: int) -> torch.Tensor:
        places = torch.arange(length)
        biases: torch.Tensor = table(places[None, :] - places[:, None] + length).permute(2, 0, 1)
        return biases

    def forward(
        self, source: torch.Tensor, target: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """The logits of the target; `mask`: which places of the source count."""
        bias = self._bias(self.distances, source.shape[1]) + (1 - mask)[:, None, None, :] * -1e4
        x = self.shared(source)
        for layer in self.encoder:
            x = layer(x, bias)
        later = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        steps = self._bias(self.steps, target.shape[1]).masked_fill(later, -1e4)
        y = self.shared(target)
        for layer in self.decoder:
            y = layer(y, steps, x)
        return nn.functional.linear(self.norm(y) * y.shape[-1] ** -0.5, self.shared.weight)
