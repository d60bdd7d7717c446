"""Language models with their key-value cache on, as transformers makes them, are imported without
it and left as they were.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.torch import NOTE, caching

tf = pytest.importorskip("transformers")
SMALL = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def llama() -> nn.Module:
    return tf.LlamaForCausalLM(tf.LlamaConfig(**SMALL))  # type: ignore[no-any-return]


class Wrapped(nn.Module):
    """A model that stands in another and keeps one more configuration, as those of pictures and
    text do.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: torch.Tensor) -> Any:
        return self.inner(input_ids=input_ids)


@pytest.mark.parametrize("build", [llama, Wrapped])
def test_the_cache_is_off_while_it_is_exported(build: Any) -> None:
    module = build()
    before = caching(module)
    loaded = load_model(module, ModelOptions(), {"input_ids": torch.arange(16).view(2, 8)})
    assert before and caching(module) == before, "the module itself stays as it was"
    assert loaded.notes == (NOTE,) and [
        loaded.graph.tensors[name].shape for name in loaded.source.outputs
    ] == [(2, 8, 64)]


def test_a_configuration_inside_a_configuration_is_found() -> None:
    module = nn.Linear(2, 2)
    outer = tf.PretrainedConfig()
    inner = tf.LlamaConfig(**SMALL)
    outer.text_config = inner
    outer.other = outer
    module.config = outer  # type: ignore[assignment]
    assert caching(module) == [inner]


def test_models_without_a_cache_have_no_note() -> None:
    assert load_model(nn.Linear(4, 4), ModelOptions(), (torch.zeros(2, 4),)).notes == ()


def test_a_plan_runs_and_gives_the_models_own_outputs() -> None:
    module = llama().eval()
    tokens = torch.arange(16).view(2, 8)
    plan = autopar.plan(module, {"input_ids": tokens}, devices=1, cluster="local-cpu")
    actual = autopar.parallelize(module, plan, {"input_ids": tokens})(input_ids=tokens)
    torch.testing.assert_close(actual.logits, module(input_ids=tokens).logits)
    assert actual.past_key_values is None
