"""The scores of sparse attention are one operator, with the values of both products."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.frontends.torch import import_torch
from autopar.torch_operators import index_scores as written
from tests.frontends.torch.test_experts import Logits
from tests.frontends.torch.test_importer import compare_with_eager

pytest.importorskip("transformers")

KIND = "autopar.index_scores.default"
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 5,
    "first_k_dense_replace": 3,
    "mlp_layer_types": ["dense"] * 3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MODELS = {
    "deepseek_v32.DeepseekV32": ({}, 3),
    "glm_moe_dsa.GlmMoeDsa": ({"head_dim": 4}, 3),
    # A layer that has no choice of its own takes that of the layer before it.
    "glm_moe_dsa.GlmMoeDsa shared": (
        {"head_dim": 4, "indexer_types": ["full", "shared", "full"]},
        2,
    ),
}


def language_model(name: str) -> nn.Module:
    module, _, family = name.partition(" ")[0].partition(".")
    library = import_module(f"transformers.models.{module}")
    configuration = getattr(library, f"{family}Config")(**(SIZES | MODELS[name][0]))
    torch.manual_seed(0)
    return Logits(getattr(library, f"{family}ForCausalLM")(configuration))


@pytest.mark.parametrize("name", MODELS)
def test_a_layer_has_one_operator_of_scores_and_no_mask_of_the_batch(name: str) -> None:
    model = language_model(name)
    tokens = torch.randint(0, 64, (3, 12))
    graph = import_torch(model, (tokens,)).graph
    assert [op.kind for op in graph.operators].count(KIND) == MODELS[name][1]
    # Each layer has a mask of its own, of the keys that it chooses; what is common is [12, 12].
    joined = [op for op in graph.operators if op.kind == "aten.__and__.Tensor"]
    assert [graph.tensors[op.inputs[0]].shape for op in joined] == [(12, 12)] * 3
    assert not any(name.startswith("model/") for op in joined for name in op.inputs)
    compare_with_eager(model, tokens)


@pytest.mark.parametrize("block", [1, 1 << 24])
def test_the_operator_has_the_values_of_both_products(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written, "BLOCK", block)
    torch.manual_seed(0)
    query = torch.randn(2, 7, 3, 4)
    key = torch.randn(2, 9, 4)
    weights = torch.randn(2, 7, 3)
    expected = (functional.relu(torch.einsum("bshd,btd->bsht", query, key) * 0.5)) * weights[
        ..., None
    ]
    made = torch.ops.autopar.index_scores(query, key, weights, 0.5)
    torch.testing.assert_close(made, expected.sum(2))
    with torch.device("meta"):
        empty = torch.ops.autopar.index_scores(
            query.to("meta"), key.to("meta"), weights.to("meta"), 0.5
        )
    assert empty.shape == made.shape and empty.dtype == torch.float32


class Scores(nn.Module):
    """Scores of keys, with a last step that may be missing."""

    def __init__(self, cut: bool) -> None:
        super().__init__()
        self.cut = cut
        self.project = nn.Linear(4, 12)

    def forward(self, x: Tensor) -> Tensor:
        query = self.project(x).unflatten(-1, (-1, 4))
        products = torch.matmul(query, x.transpose(-1, -2).unsqueeze(1)) * 0.5
        seen = functional.relu(products) if self.cut else products.sigmoid()
        result: Tensor = torch.matmul(x[..., :3].unsqueeze(-2), seen).squeeze(-2)
        return result


@pytest.mark.parametrize("cut", [True, False])
def test_scores_that_are_trained_have_their_gradients(cut: bool) -> None:
    model = Scores(cut)
    x = torch.randn(2, 5, 4)
    kinds = [op.kind for op in import_torch(model, (x,)).graph.operators]
    assert (KIND in kinds) == cut
    compare_with_eager(model, x)
