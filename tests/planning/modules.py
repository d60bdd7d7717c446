"""Modules with known best plans, on the meta device, and helpers that look into a plan."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import plan_loaded
from autopar.frontends.load import LoadedModel, ModelOptions, load_model
from autopar.plan import Plan
from autopar.sharding.analysis import analyse
from autopar.sharding.program import Program


class Layer(nn.Module):
    """A transformer layer with separate projections."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        y = self.norm1(x)
        q, k, v = (
            f(y).view(b, s, self.heads, w // self.heads).transpose(1, 2)
            for f in (self.q, self.k, self.v)
        )
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, w)
        )
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def transformer(layers: int, width: int, heads: int) -> nn.Module:
    """Layers without weights."""
    with torch.device("meta"):
        return nn.Sequential(*(Layer(width, heads) for _ in range(layers)))


def perceptron(*sizes: int, bias: bool = False) -> nn.Module:
    """Linear layers with ReLU between them, without weights."""
    modules: list[nn.Module] = []
    with torch.device("meta"):
        for i in range(len(sizes) - 1):
            modules += [nn.Linear(sizes[i], sizes[i + 1], bias=bias), nn.ReLU()]
        return nn.Sequential(*modules[:-1])


def loaded(
    module: nn.Module, *shape: int, train: bool = True, dtype: str | None = None
) -> LoadedModel:
    """The module with one float input of this shape."""
    return load_model(
        module, ModelOptions(train=train, dtype=dtype), (torch.empty(shape, device="meta"),)
    )


def plan_of(model: LoadedModel, **options: Any) -> Plan:
    """A plan, for the preset `dgx-h100` unless another cluster is named."""
    return plan_loaded(model, **{"cluster": "dgx-h100", **options}).plan


def program_of(plan: Plan, model: LoadedModel) -> Program:
    """The program that executes a plan."""
    return plan.program(analyse(model.graph, train=plan.model.mode == "train"))
