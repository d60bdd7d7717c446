"""Experts that all work on all tokens, most of them on zeros, are read as those that are chosen."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.frontends.torch import import_torch
from autopar.sharding.rules.experts import EXPERTS
from tests.frontends.torch.test_experts import Logits, layers
from tests.frontends.torch.test_importer import compare_with_eager

tf = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "intermediate_size_mlp": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


@pytest.mark.parametrize(("chosen", "step", "count"), [(1, 1, 4), (2, 2, 2)])
def test_llama_4_has_layers_of_chosen_experts(chosen: int, step: int, count: int) -> None:
    torch.manual_seed(0)
    config = tf.Llama4TextConfig(
        **SIZES, num_experts_per_tok=chosen, interleave_moe_layer_step=step
    )
    model = Logits(tf.Llama4ForCausalLM(config))
    for name, parameter in model.named_parameters():
        # Its experts start as zeros, of which no test would see anything.
        if "experts" in name:
            nn.init.normal_(parameter, std=0.5)
    tokens = torch.randint(0, 64, (2, 8))
    graph = import_torch(model, (tokens,)).graph
    read = layers(graph)
    assert len(read) == count
    assert all(call.outputs[0].shape == (2 * 8 * chosen, 32) for call in read)
    assert not [op.kind for op in graph.operators if "bmm" in op.kind or "repeat" in op.kind]
    compare_with_eager(model, tokens)


class Dense(nn.Module):
    """Two experts on all tokens."""

    def __init__(self, hidden: float = -math.inf, bias: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = hidden
        self.router = nn.Linear(4, 2, bias=False)
        self.up = nn.Parameter(torch.randn(2, 4, 6))
        self.down = nn.Parameter(torch.randn(2, 6, 4))
        self.bias = nn.Parameter(torch.randn(2, 1, 6)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        logits = self.router(x)
        values, places = torch.topk(logits, 1, dim=1)
        scores = torch.full_like(logits, self.hidden).scatter(1, places, values).sigmoid()
        rows = x.repeat(2, 1) * scores.transpose(0, 1).reshape(-1, 1)
        inner = functional.silu(torch.bmm(rows.view(2, -1, 4), self.up))
        if self.bias is not None:
            inner = inner + self.bias
        result: Tensor = torch.bmm(inner, self.down).view(2, -1, 4).sum(dim=0)
        return result


@pytest.mark.parametrize(
    ("experts", "is_read"),
    [(Dense(), True), (Dense(hidden=0.0), False), (Dense(bias=True), False)],
    ids=["zeros", "scores of all", "biases"],
)
def test_experts_stay_that_make_more_than_zeros(experts: nn.Module, is_read: bool) -> None:
    x = torch.randn(6, 4)
    kinds = [op.kind for op in import_torch(experts, (x,)).graph.operators]
    assert (EXPERTS in kinds) == is_read
    compare_with_eager(experts, x)
