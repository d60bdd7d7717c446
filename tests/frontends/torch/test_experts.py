"""Layers of experts are read as one operator: with what they contain, on which factors, and giving
what the module gives.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.frontends.torch import import_torch
from autopar.frontends.torch.experts import layers as torch_experts
from autopar.frontends.torch.experts import routing as torch_routing
from autopar.ir import Graph
from autopar.sharding.rules import RULES, Call, rule_of
from autopar.sharding.rules.experts import EXPERTS, PRODUCTS, network_of
from tests.frontends.torch.test_importer import compare_with_eager

import_module("transformers.integrations.moe")  # registers the product
grouped = torch.ops.transformers.grouped_mm_fallback
ROUTING = ("sort", "histc", "cumsum", "index_put", "index.Tensor")


PRODUCT = "grouped_mm_fallback"


class Logits(nn.Module):
    """A language model called with its tokens alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits."""
        output: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return output


def language_model(name: str, **sizes: Any) -> nn.Module:
    """A small model of transformers with two layers of four experts."""
    library = import_module("transformers")
    common = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
    }
    config = getattr(library, f"{name}Config")(
        **common, **sizes, max_position_embeddings=32, attn_implementation="eager"
    )
    torch.manual_seed(0)
    return Logits(
        library.AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    )


MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": {"intermediate_size": 48, "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": {
        "moe_intermediate_size": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
        "decoder_sparse_step": 1,
    },
    "GptOss": {
        "intermediate_size": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "head_dim": 8,
    },
}


def tokens() -> Tensor:
    return torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))


def layers(graph: Graph) -> list[Call]:
    return [Call.of(graph, op) for op in graph.operators if op.kind == EXPERTS]


def splittable(call: Call) -> set[str]:
    rule = rule_of(call)
    return {factor.name for factor in rule.factors if not factor.whole}


@pytest.mark.parametrize("name", MODELS)
def test_layers_of_known_models(name: str) -> None:
    """One operator a layer, without the sorting of tokens; gate and what it gates lie apart, or
    element by element in GPT-OSS.
    """
    module = language_model(name, **MODELS[name])
    graph = import_torch(module, (tokens(),)).graph
    actual = layers(graph)
    assert len(actual) == 2
    assert not [
        op.kind
        for op in graph.operators
        if "grouped" in op.kind or ("mlp" in op.name and any(w in op.kind for w in ROUTING))
    ]
    assert all(
        call.operator.name.endswith("/experts") and call.position("chosen") == 1 for call in actual
    )
    # The results are weighed and added up inside: a row for each token.
    assert all(
        call.position("scores") == len(call.inputs) - 1
        and call.outputs[0].shape[0] == call.inputs[0].shape[0]
        for call in actual
    )
    assert all(
        splittable(call) == ({"t", "e"} if name == "GptOss" else {"t", "e", "f"}) for call in actual
    )
    compare_with_eager(module, tokens())


class Sorted(nn.Module):
    """Experts on rows that come sorted, with a product each for gate and up; what `leak` names is
    returned too.
    """

    def __init__(self, *, leak: bool = False, single: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w1, self.w3 = (nn.Parameter(torch.randn(3, 8, 16)) for _ in range(2))
        self.w2 = nn.Parameter(torch.randn(3, 16, 8))
        self.leak = leak
        self.single = single

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """[rows, 8] to [rows, 8]."""
        h = F.silu(grouped(rows, self.w1, ends))
        if self.single:
            return h
        h = h * grouped(rows, self.w3, ends)
        out = grouped(h, self.w2, ends)
        return (out, h) if self.leak else out


def rows() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 8, generator=torch.Generator().manual_seed(1)), torch.tensor(
        [2, 7, 12], dtype=torch.int32
    )


def test_sorted_rows() -> None:
    graph = import_torch(Sorted(), rows()).graph
    (layer,) = layers(graph)
    assert (
        layer.operator.name == "experts" and layer.position("ends") == 1 and len(layer.inputs) == 5
    )
    assert splittable(layer) == {"t", "e", "f"}
    assert [inner.kind.split(".")[1] for inner in network_of(layer)] == [
        PRODUCT,
        "silu",
        PRODUCT,
        "mul",
        PRODUCT,
    ]
    compare_with_eager(Sorted(), *rows())


@pytest.mark.parametrize("how", ["leak", "single"])
def test_what_is_no_layer_stays(how: str) -> None:
    """A value in between that is read elsewhere, and a product on its own."""
    graph = import_torch(Sorted(**{how: True}), rows()).graph
    assert not layers(graph) and any(PRODUCT in op.kind for op in graph.operators)


class Routed(nn.Module):
    """Two tokens' experts, sorted and brought back in ways that are, or only look like, a
    permutation and its inverse.
    """

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Parameter(torch.randn(3, 8, 16))
        self.down = nn.Parameter(torch.randn(3, 16, 8))
        self.how = how

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """[tokens, 8] to [tokens * 2, 8]."""
        experts, places = torch.sort(chosen)
        ends = torch.cumsum(
            torch.histc(experts.float(), bins=3, min=0, max=2), 0, dtype=torch.int32
        )
        divisor = 3 if self.how == "divided" else 2
        made = grouped(F.gelu(grouped(x[places // divisor], self.up, ends)), self.down, ends)
        made = made * weights[places].unsqueeze(-1)
        back = torch.argsort(places, descending=self.how == "backwards")
        return made[places if self.how == "twice" else back]


@pytest.mark.parametrize("how", ["right", "divided", "backwards", "twice"])
def test_routing_is_left_out_only_where_it_is_undone(how: str) -> None:
    generator = torch.Generator().manual_seed(2)
    given = (
        torch.randn(8, 8, generator=generator),
        torch.randint(0, 3, (16,), generator=generator),
        torch.rand(16, generator=generator),
    )
    graph = import_torch(Routed(how), given).graph
    (layer,) = layers(graph)
    assert (layer.position("chosen") is not None) == (how == "right")
    compare_with_eager(Routed(how), *given)


class Summed(nn.Module):
    """Two weighed results of each token, added up in ways that are, or are not, a sum of tokens."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.routed = Routed("right")
        self.how = how

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Any:
        """[tokens, 8] to [tokens, 8]."""
        made = self.routed(x, chosen, weights)
        if self.how == "across":
            return made.view(2, -1, 8).sum(0)
        total = made.view(-1, 2, 8).sum(1, keepdim=self.how == "kept")
        return total + made.mean() if self.how == "read" else total


@pytest.mark.parametrize("how", ["sum", "across", "kept", "read"])
def test_results_are_added_up_inside_only_where_they_are_those_of_tokens(how: str) -> None:
    generator = torch.Generator().manual_seed(2)
    given = (
        torch.randn(8, 8, generator=generator),
        torch.randint(0, 3, (16,), generator=generator),
        torch.rand(16, generator=generator),
    )
    (layer,) = layers(import_torch(Summed(how), given).graph)
    assert (layer.position("scores") is not None) == (how == "sum")
    compare_with_eager(Summed(how), *given)


def test_what_is_read_has_rules() -> None:
    """The importer knows no rules, so it lists the operators itself."""
    assert set(torch_routing.PRODUCTS) == set(PRODUCTS)
    assert set(torch_experts.ELEMENTWISE | torch_experts.PARTED | torch_experts.SLICED) <= set(
        RULES
    )
    assert torch_experts.KIND == EXPERTS


def test_experts_of_equal_layers_are_joined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[Graph] = []
    join = torch_experts._Layer.joined

    def counted(layer: Any) -> Graph:
        joined.append(join(layer))
        return joined[-1]

    monkeypatch.setattr(torch_experts._Layer, "joined", counted)
    graph = import_torch(language_model("Mixtral", **MODELS["Mixtral"]), (tokens(),)).graph
    assert len(layers(graph)) == 2
    assert len(joined) == 1
