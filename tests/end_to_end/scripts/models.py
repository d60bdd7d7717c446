"""The models of the scripts: small language models in several forms, and a classifier with batch
norms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 24
WIDTH = 16
HEADS = 2
BATCH = 8
LENGTH = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The sizes of a model.

    Scripts read it off the module, as they do with models of a library.
    """

    layers: int = 2
    dropout: float = 0.0
    loss: bool = True
    masked: bool = False
    tied: bool = False
    unused: bool = False
    frozen: bool = False


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and beside a residual."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH, bias=False)
        # Few biases: every parameter costs time, and that of a key has a gradient of nothing but
        # rounding, which AdamW would blow up.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.norm = nn.LayerNorm(WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """One layer; `mask`: what is added to the scores."""
        q, k, v = (
            part.view(*part.shape[:2], HEADS, -1).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        x = x + self.dropout(self.out(attended.transpose(1, 2).flatten(2)))
        output: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return output


class Language(nn.Module):
    """A language model that returns its loss, or the scores of the next token."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        if config.unused:
            self.spare = nn.Linear(WIDTH, WIDTH)
        if config.frozen:
            self.embed.requires_grad_(False)
            self.blocks[0].requires_grad_(False)

    def forward(
        self, tokens: Tensor, targets: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor:
        """The mean cross entropy where the model has a loss, else the scores."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, mask)
        scores: Tensor = self.head(self.norm(x))
        if not self.config.loss:
            return scores
        assert targets is not None
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())

    def generate(self, tokens: Tensor, count: int) -> Tensor:
        """The tokens with `count` more, each the likeliest."""
        for _ in range(count):
            tokens = torch.cat([tokens, self(tokens)[:, -1].argmax(-1, keepdim=True)], dim=1)
        return tokens


class Classifier(nn.Module):
    """Linear layers with batch norms; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 32),
            nn.BatchNorm1d(32),
            nn.ReLU(),
            nn.Linear(32, 4),
        )

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        """The mean cross entropy."""
        return F.cross_entropy(self.layers(x), labels)


def batch(step: int = 0, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """The tokens of a step and those that follow them; every rank has all of it."""
    drawn = torch.randint(
        0, VOCABULARY, (size, LENGTH + 1), generator=torch.Generator().manual_seed(step)
    )
    return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def pictures(step: int = 0, size: int = BATCH) -> tuple[Tensor, Tensor]:
    """The features of a step and their labels."""
    drawn = torch.Generator().manual_seed(step)
    return torch.randn(size, WIDTH, generator=drawn, dtype=torch.float64), torch.randint(
        0, 4, (size,), generator=drawn
    )


def mask() -> Tensor:
    """Causal, and nothing looks at the second token."""
    blocked = torch.ones(LENGTH, LENGTH).triu(1).bool()
    blocked[2:, 1] = True
    return torch.zeros(LENGTH, LENGTH, dtype=torch.float64).masked_fill(blocked, -1e9)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A model, the arguments that it is planned with, and the type of its weights."""

    build: Callable[[], nn.Module]
    inputs: tuple[Tensor, ...]
    dtype: torch.dtype = torch.float64

    def made(self, seed: int) -> nn.Module:
        """The module with weights drawn from `seed`, in training mode."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build().to(self.dtype).train()


def _language(**config: float) -> Callable[[], nn.Module]:
    return lambda: Language(replace(Config(), **config))  # type: ignore[arg-type]


KINDS: Mapping[str, Kind] = {
    "language": Kind(build=_language(), inputs=batch()),
    "language32": Kind(build=_language(), inputs=batch(), dtype=torch.float32),
    "language16": Kind(build=_language(), inputs=batch(), dtype=torch.bfloat16),
    "scores": Kind(build=_language(loss=False), inputs=batch()[:1]),
    "dropout": Kind(build=_language(dropout=0.2), inputs=batch()),
    "tied": Kind(build=_language(tied=True), inputs=batch()),
    "frozen": Kind(build=_language(frozen=True), inputs=batch()),
    "unused": Kind(build=_language(unused=True), inputs=batch()),
    "shallow": Kind(build=_language(layers=1), inputs=batch()),
    "norms": Kind(build=Classifier, inputs=pictures()),
}
