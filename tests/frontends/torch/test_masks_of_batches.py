"""Masks that layers read beside their own are made for one sequence where all have the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.torch import import_torch
from tests.frontends.torch.test_experts import Logits
from tests.frontends.torch.test_importer import compare_with_eager

tf = pytest.importorskip("transformers")
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def test_masks_that_are_added_to_scores() -> None:
    torch.manual_seed(0)
    config = tf.Gemma2Config(**SIZES, attn_implementation="eager")
    model = Logits(tf.Gemma2ForCausalLM(config))
    tokens = torch.randint(0, 64, (3, 8))
    graph = import_torch(model, (tokens,)).graph
    attention = [op.attributes for op in graph.operators if "attention" in op.kind]
    assert [given["is_causal"] for given in attention] == [True, True]
    assert [given.get("window") for given in attention] == [3, None]
    assert len({given["cap"] for given in attention}) == 1
    compare_with_eager(model, tokens)


class Masked(nn.Module):
    """Fills scores [b, s, s] by a mask that is causal, of the first sequence alone or of all."""

    def __init__(self, alike: bool) -> None:
        super().__init__()
        self.alike = alike
        self.project = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1])
        hidden = places[:, None] < places
        batch = torch.arange(x.shape[0])[:, None, None]
        hidden = hidden.expand(x.shape[0], -1, -1)
        if not self.alike:
            hidden = hidden & (batch < 1)
        scores = self.project(x) @ x.transpose(1, 2)
        return scores.masked_fill(hidden, 0.0)


@pytest.mark.parametrize("alike", [True, False])
def test_a_mask_that_differs_between_sequences_stays(alike: bool) -> None:
    x = torch.randn(3, 5, 4)
    model = Masked(alike)
    graph = import_torch(model, (x,)).graph
    fill = next(op for op in graph.operators if op.kind == "aten.masked_fill.Scalar")
    assert graph.tensors[fill.inputs[1]].shape == ((5, 5) if alike else (3, 5, 5))
    compare_with_eager(model, x)
