"""A small transformer of linear layers, embeddings and norms, as people write it for tensor
parallelism.
"""

from __future__ import annotations

import ast

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and feed-forward.

    The number of heads follows from the features that a rank holds.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (f(y).unflatten(2, (-1, 16)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            .transpose(1, 2)
            .flatten(2)
        )
        return x + self.down(torch.relu(self.up(self.norm2(x))))


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(128, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 128, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        output: Tensor = self.head(self.norm(x))
        return output


def build() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The net with the same weights in every process, and a batch."""
    torch.manual_seed(0)
    return Net(), (torch.randint(0, 128, (8, 32), generator=torch.Generator().manual_seed(1)),)


def styles_of(text: str) -> dict[str, str]:
    """The styles of modules in a written `DistributedConfig`."""
    (call,) = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    fields = {word.arg: ast.literal_eval(word.value) for word in call.keywords}
    styles: dict[str, str] = fields["tp_plan"]
    return styles
