"""A small language model with all that a checkpoint has to carry, its plans, and a few steps of
training.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.plan import Plan
from autopar.runtime.module.parallel_module import ParallelModule

WIDTH = 16
ROWS = 24
BATCH = 8
LENGTH = 4


class Language(nn.Module):
    """A fused projection, dropout, tied weights, a buffer, and the loss inside."""

    def __init__(self, rows: int = ROWS) -> None:
        super().__init__()
        self.embed = nn.Embedding(rows, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)
        self.head = nn.Linear(WIDTH, rows, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (
            part.view(BATCH, LENGTH, 4, 4).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(WIDTH, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(mixed.transpose(1, 2).reshape(BATCH, LENGTH, WIDTH)))
        x = x + self.drop(self.down(F.gelu(self.up(x))) * self.scale)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.roll(-1, 1).flatten())


def language(seed: int = 0, rows: int = ROWS) -> Language:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Language(rows)


def tokens(step: int) -> Tensor:
    return torch.randint(0, ROWS, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))


SCHEMES: Mapping[str, Mapping[str, Any]] = {
    "data": {"scheme": "data"},
    "zero3": {"scheme": "zero3"},
    "zero1": {"scheme": "zero1"},
    "megatron": {"scheme": "megatron"},
    "megatron x data": {"scheme": "1x2x2"},
    "stages": {"stages": 2, "micro_batches": 2, "schedule": "1f1b"},
    "alone": {},
}


@functools.cache
def plan_of(scheme: str, devices: int) -> Plan:
    """Made before the ranks are forked."""
    return autopar.plan(
        language(), (tokens(0),), devices=devices, cluster="local-cpu", **SCHEMES[scheme]
    )


def built(scheme: str, devices: int, seed: int = 0) -> tuple[ParallelModule, torch.optim.Optimizer]:
    """The module under its plan, with an optimizer of two groups."""
    module = autopar.parallelize(language(seed), plan_of(scheme, devices), (tokens(0),))
    return module, optimizer_of(module)


def optimizer_of(module: nn.Module, lr: float = 0.05) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1]},
        {"params": [p for p in module.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr)


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    """The losses of steps; each has a batch of its own, and a learning rate."""
    results = []
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 / (1 + step)
        optimizer.zero_grad()
        loss = (
            module(tokens(step))
            if not isinstance(module, ParallelModule)
            else module.loss(tokens(step))
        )
        loss.backward()
        optimizer.step()
        results.append(float(loss.detach()))
    return results
