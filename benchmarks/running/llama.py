"""Llama in plain torch, with the interface of GPT-2: norms, rotation and gate as written there."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .gpt2 import HEAD, Gpt2, Shape


class Norm(nn.Module):
    """Root mean squares, in single precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """The scaled rows."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return self.weight * scaled.to(x.dtype)


class Block(nn.Module):
    """Grouped attention with rotary positions, and a gated feed-forward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.width
        inner = width * 11 // 4
        # Two heads of keys at least, so that two ranks can split them.
        shared = max(width // 2, 2 * HEAD)
        self.norm1 = Norm(width)
        self.norm2 = Norm(width)
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, shared, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)
        angles = torch.outer(
            torch.arange(shape.sequence), 1e4 ** (-torch.arange(0, HEAD, 2) / HEAD)
        )
        both = torch.cat((angles, angles), -1)
        self.register_buffer("cos", both.cos(), persistent=False)
        self.register_buffer("sin", both.sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        """Queries or keys, turned by their positions."""
        first, second = x.chunk(2, -1)
        return x * self.cos + torch.cat((-second, first), -1) * self.sin

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        h = self.norm1(x)
        q, k, v = (
            part(h).view(*h.shape[:2], -1, HEAD).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        made = F.scaled_dot_product_attention(
            self.turned(q), self.turned(k), v, is_causal=True, enable_gqa=True
        )
        x = x + self.out(made.transpose(1, 2).flatten(2))
        h = self.norm2(x)
        output: Tensor = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return output


class Llama(Gpt2):
    """The model with its mean cross entropy."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
