"""Masks that no input reaches are left out where they are causal or hide nothing, and stay where
they differ from that in one element or hang on an input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from autopar.frontends.torch import import_torch
from autopar.frontends.torch.masks import known_values, without_known_masks
from autopar.ir import Graph, Operator
from autopar.ir import Tensor as Value
from autopar.ir.recipes import ATTENTIONS
from autopar.model import TorchModel
from autopar.runtime.checking.check import one_device
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups

SMALL: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
SEQUENCE = 8
SLIDING = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_layers": 1}
    config = tf.T5Config(vocab_size=64, **sizes, decoder_start_token_id=0)
    return tf.T5ForConditionalGeneration(config)  # type: ignore[no-any-return]


# Model -> it, and of each of its attentions: whether it is causal, and whether it keeps a mask.
MODELS: Mapping[str, tuple[Callable[[], nn.Module], list[tuple[bool, bool]]]] = {
    "llama": (lambda: tf.LlamaForCausalLM(tf.LlamaConfig(**GROUPED)), [(True, False)] * 2),
    "qwen3": (lambda: tf.Qwen3ForCausalLM(tf.Qwen3Config(**GROUPED)), [(True, False)] * 2),
    "mistral with a long window": (
        lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=SEQUENCE)),
        [(True, False)] * 2,
    ),
    "mistral with a window": (
        lambda: tf.MistralForCausalLM(tf.MistralConfig(**GROUPED, sliding_window=4)),
        [(True, False)] * 2,
    ),
    "gemma 3": (
        lambda: tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**GROUPED, **SLIDING)),
        [(True, False)] * 2,
    ),
    "gpt-2": (
        lambda: tf.GPT2LMHeadModel(
            tf.GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=4, use_cache=False)
        ),
        [(True, False)],
    ),
    "bert": (lambda: tf.BertModel(tf.BertConfig(**SMALL)), [(False, False)] * 2),
    # A mask of it is a trained bias as well; attention to the encoder has none.
    "t5": (t5, [(False, True), (False, True), (False, False)]),
}


def ids(batch: int = 2) -> Tensor:
    return torch.randint(0, 64, (batch, SEQUENCE), generator=torch.Generator().manual_seed(1))


def inputs(name: str, batch: int = 2) -> dict[str, Tensor]:
    return {"input_ids": ids(batch), **({"labels": ids(batch)} if name == "t5" else {})}


def attentions(graph: Graph) -> list[Operator]:
    return [op for op in graph.operators if op.kind in ATTENTIONS]


def seen(graph: Graph) -> list[tuple[bool, bool]]:
    """Pairs of whether an attention is causal, and whether it keeps a mask."""
    return [
        (op.attributes.get("is_causal") is True, op.attributes.get("attn_mask") is not None)
        for op in attentions(graph)
    ]


def made(graph: Graph) -> list[Value]:
    """The values of a graph's operators."""
    return [graph.tensors[name] for op in graph.operators for name in op.outputs]


def computed(model: TorchModel, module: nn.Module, *given: Tensor) -> list[Tensor]:
    values = {**model.constants, **dict(module.named_buffers()), **dict(module.named_parameters())}
    local = ParallelModule(one_device(model.graph), DeviceGroups.single(), values)
    with torch.no_grad():
        return list(local(*given))


@pytest.mark.parametrize("batch", [1, 2, 8])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers(name: str, batch: int) -> None:
    build, expected = MODELS[name]
    module = build().eval()
    given = inputs(name, batch)
    model = import_torch(module, (), given)
    assert seen(model.graph) == expected
    with torch.no_grad():
        wanted = [value for value in module(**given).values() if isinstance(value, Tensor)]
    torch.testing.assert_close(computed(model, module, *given.values()), wanted)


def test_what_made_the_masks_goes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module = MODELS["qwen3"][0]().train()
    after = import_torch(module, (), inputs("qwen3")).graph
    monkeypatch.setattr(
        "autopar.frontends.torch.reader.without_known_masks", lambda graph, constants: graph
    )
    before = import_torch(module, (), inputs("qwen3")).graph
    assert (len(before.operators), len(after.operators)) == (99, 75)
    assert (2, 1, SEQUENCE, SEQUENCE) in [t.shape for t in made(before)]
    assert (2, 1, SEQUENCE, SEQUENCE) not in [t.shape for t in made(after)]
    again = without_known_masks(before, {})
    assert again.fingerprint() == after.fingerprint()


@pytest.mark.parametrize("batch", [1, 8])
def test_a_window_of_keys_before_is_an_attribute(batch: int) -> None:
    graph = import_torch(MODELS["mistral with a window"][0](), (), inputs("", batch)).graph
    assert [op.attributes["window"] for op in attentions(graph)] == [4, 4]
    assert not [t for t in made(graph) if t.dtype == "bool"]


@pytest.mark.parametrize("given", ["attention_mask", "position_ids"])
def test_a_mask_of_an_input_stays(given: str) -> None:
    module = MODELS["llama"][0]()
    data = {"input_ids": ids(), given: torch.ones(2, SEQUENCE, dtype=torch.int64)}
    assert seen(import_torch(module, (), data).graph) == [(False, True)] * 2


@pytest.mark.parametrize(("name", "sequence"), [("qwen3", 4096), ("gemma 3", 32768)])
def test_a_large_batch_is_not_laid_out(
    name: str, sequence: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = []
    call = known_values._call

    def noted(operator: Operator, given: list[Tensor], *device: str) -> Tensor | None:
        result = call(operator, given, *device)
        if result is not None and not result.is_meta:
            sizes.append(result.untyped_storage().nbytes())
        return result

    monkeypatch.setattr(known_values, "_call", noted)
    with torch.device("meta"):
        module = MODELS[name][0]()
        data = torch.zeros(1024, sequence, dtype=torch.int64)
    graph = import_torch(module, (), {"input_ids": data}).graph
    assert seen(graph) == MODELS[name][1]
    assert 0 < max(sizes) <= 8 * (sequence + 1)


# --- masks written by hand ---

COUNT = 6


def places() -> tuple[Tensor, Tensor]:
    return torch.arange(COUNT).unsqueeze(1), torch.arange(COUNT).unsqueeze(0)


def ones() -> Tensor:
    return torch.ones(COUNT, COUNT, dtype=torch.bool)


def but_one(mask: Tensor, row: int, column: int) -> Tensor:
    queries, keys = places()
    return mask ^ ((queries == row) & (keys == column))


def added(hidden: float) -> Tensor:
    return torch.zeros(COUNT, COUNT).masked_fill(~ones().tril(), hidden)


LEAST = torch.finfo(torch.float32).min
CAUSAL: Mapping[str, Callable[[], Tensor]] = {
    "a lower triangle": lambda: ones().tril(),
    "compared from the right": lambda: places()[0] >= places()[1],
    "compared, and not": lambda: ~(places()[1] > places()[0]),
    "of other places": lambda: places()[1] * 2 < places()[0] * 2 + 1,
    "of float places": lambda: places()[1].float() <= places()[0].float(),
    "for each batch and head": lambda: ones().tril().expand(2, 2, COUNT, COUNT),
    "a cut of a larger one": lambda: torch.ones(8, 8, dtype=torch.bool).tril()[:COUNT, :COUNT],
    "in a window of all": lambda: (places()[1] <= places()[0]) & (places()[1] > places()[0] - 6),
    "added": lambda: torch.triu(torch.full((COUNT, COUNT), -math.inf), diagonal=1),
    "added, the least number": lambda: added(LEAST),
    "added, by a choice": lambda: torch.where(places()[1] <= places()[0], 0.0, -math.inf),
    "added, by a lifted number": lambda: torch.where(ones().tril(), 0.0, torch.tensor(-math.inf)),
}
WHOLE: Mapping[str, Callable[[], Tensor]] = {
    "all": ones,
    "nothing added": lambda: torch.zeros(1, 1, COUNT, COUNT),
    "a row for all": lambda: (torch.arange(COUNT) >= 0).expand(COUNT, COUNT),
    "one document": lambda: places()[0] // COUNT == places()[1] // COUNT,
}
BEHIND: Mapping[str, tuple[int, Callable[[], Tensor]]] = {
    "causal": (3, lambda: (places()[1] <= places()[0]) & (places()[1] > places()[0] - 3)),
    "a cut of it with a batch": (
        3,
        lambda: (ones().tril() & ones().triu(-2)).expand(2, 1, COUNT, COUNT),
    ),
    "added": (2, lambda: added(-math.inf).masked_fill(places()[1] < places()[0] - 1, -math.inf)),
}
WINDOWS: Mapping[str, Callable[[], Tensor]] = {
    "around": lambda: (places()[0] - places()[1]).abs() <= 2,
    "up to one key behind": lambda: ones().tril(1),
    "the keys from one before": lambda: ones().triu(-1),
}
OTHER: Mapping[str, Callable[[], Tensor]] = {
    "one more key": lambda: but_one(ones().tril(), 2, 4),
    "one key less": lambda: but_one(ones().tril(), 5, 1),
    "all but one": lambda: but_one(ones(), 3, 0),
    "a window but one key": lambda: but_one(ones().triu(-1) & ones().tril(1), 3, 4),
    "a window that holds no key of the first query": lambda: ones().tril(-1) | ~ones().tril(4),
    "two documents of unequal lengths": lambda: (places()[0] < 1) == (places()[1] < 1),
    "one batch only": lambda: ones().tril() | (torch.arange(2) > 0).view(2, 1, 1, 1),
    "added, a small number": lambda: added(-5.0),
    "added, and more": lambda: added(-math.inf) + 0.5 * (places()[1] == 0),
    "by chance": lambda: ones().tril() & (torch.rand(COUNT, COUNT) >= 0),
}


class Masked(nn.Module):
    """Attention of an input to itself, behind a mask made in the forward pass."""

    def __init__(self, mask: Callable[[], Tensor]) -> None:
        super().__init__()
        self.mask = mask
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return scaled_dot_product_attention(x * self.scale, x, x, attn_mask=self.mask())


def imported(mask: Callable[[], Tensor]) -> Graph:
    """The graph of an attention behind a mask, which computes what the module does."""
    module = Masked(mask)
    x = torch.randn(2, 2, COUNT, 4, generator=torch.Generator().manual_seed(0))
    model = import_torch(module, (x,))
    torch.testing.assert_close(computed(model, module, x), [module(x)])
    return model.graph


def windows(graph: Graph) -> list[str]:
    return [op.name for op in graph.operators if op.name.startswith("window")]


@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask(name: str) -> None:
    assert seen(imported(CAUSAL[name])) == [(True, False)]


@pytest.mark.parametrize("name", WHOLE)
def test_a_mask_that_hides_nothing(name: str) -> None:
    assert seen(imported(WHOLE[name])) == [(False, False)]


@pytest.mark.parametrize("name", BEHIND)
def test_a_window_behind_a_query(name: str) -> None:
    window, mask = BEHIND[name]
    graph = imported(mask)
    (attention,) = attentions(graph)
    assert seen(graph) == [(True, False)] and attention.attributes["window"] == window


def test_attention_with_dropout_has_its_window_as_a_mask() -> None:
    class Dropped(Masked):
        def forward(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(x, x, x, self.mask(), 0.5) * self.scale

    x = torch.zeros(1, 1, COUNT, 4)
    graph = import_torch(Dropped(BEHIND["causal"][1]), (x,)).graph
    assert seen(graph) == [(False, True)] and len(windows(graph)) == 7


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_made_of_two_comparisons(name: str) -> None:
    graph = imported(WINDOWS[name])
    (attention,) = attentions(graph)
    assert len(windows(graph)) == 7
    assert graph.tensors[attention.inputs[3]].shape == (COUNT, COUNT)


def test_blocks_are_samples_of_their_own() -> None:
    graph = imported(lambda: places()[0] // 3 == places()[1] // 3)
    assert seen(graph) == [(False, False)]
    (attention,) = attentions(graph)
    assert graph.tensors[attention.outputs[0]].shape == (2 * COUNT // 3, 2, 3, 4)


@pytest.mark.parametrize("name", OTHER)
def test_another_mask_stays(name: str) -> None:
    graph = imported(OTHER[name])
    assert seen(graph) == [(False, True)] and not windows(graph)


def test_the_least_number_of_half_precision_stays() -> None:
    """Scores of its size are possible there, and would show what it hides."""
    least = torch.finfo(torch.float16).min

    def mask() -> Tensor:
        return torch.zeros(COUNT, COUNT).masked_fill(~ones().tril(), least).half()

    x = torch.zeros(1, 1, COUNT, 4, dtype=torch.float16)
    assert seen(import_torch(Masked(mask).half(), (x,)).graph) == [(False, True)]


def test_a_buffer_stays() -> None:
    module = Masked(lambda: module.causal)
    module.register_buffer("causal", ones().tril())
    x = torch.zeros(1, 1, COUNT, 4)
    assert seen(import_torch(module, (x,)).graph) == [(False, True)]


def test_a_causal_mask_that_is_not_square_stays() -> None:
    """Torch's kernels do not agree on which keys its last query sees."""

    class Cut(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(x[..., :4, :], x, x, attn_mask=ones().tril()[:4])

    assert seen(import_torch(Cut(), (torch.zeros(1, 1, COUNT, 4),)).graph) == [(False, True)]


def test_numbers_that_belie_their_shape_take_no_memory() -> None:
    """As a file may have them."""
    graph = imported(WINDOWS["up to one key behind"])
    operators = tuple(
        replace(op, attributes={"end": 2**40}) if op.name.endswith("arange") else op
        for op in graph.operators
    )
    before = replace(graph, operators=operators)
    assert without_known_masks(before, {}) == before
