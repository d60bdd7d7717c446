"""Models of the transformers library: they import whole, under names that other layers do not
change, and on the meta device.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor, nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.torch import import_torch
from autopar.ir import Role
from autopar.model import TorchModel
from autopar.runtime.checking.check import one_device
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.analysis import analyse

SMALL: Mapping[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4}
TEXT: Mapping[str, Any] = {
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}


def llama(layers: int) -> nn.Module:
    config = tf.LlamaConfig(
        **SMALL, **TEXT, num_hidden_layers=layers, num_key_value_heads=2, use_cache=False
    )
    return tf.LlamaForCausalLM(config).eval()  # type: ignore[no-any-return]


def gpt2(layers: int) -> nn.Module:
    config = tf.GPT2Config(**TEXT, n_embd=32, n_layer=layers, n_head=4, use_cache=False)
    return tf.GPT2LMHeadModel(config).eval()  # type: ignore[no-any-return]


def bert(layers: int) -> nn.Module:
    return tf.BertModel(tf.BertConfig(**SMALL, **TEXT, num_hidden_layers=layers)).eval()  # type: ignore[no-any-return]


def vit(layers: int) -> nn.Module:
    config = tf.ViTConfig(**SMALL, num_hidden_layers=layers, image_size=16, patch_size=4)
    return tf.ViTForImageClassification(config).eval()  # type: ignore[no-any-return]


MODELS = {"llama": llama, "gpt2": gpt2, "bert": bert, "vit": vit}


def inputs(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "vit":
        return {"pixel_values": torch.randn(2, 3, 16, 16, generator=generator)}
    return {"input_ids": torch.randint(0, 64, (2, 8), generator=generator)}


def imported(name: str, layers: int) -> TorchModel:
    return import_torch(MODELS[name](layers), (), inputs(name))


@pytest.mark.parametrize("name", MODELS)
def test_adding_a_layer_renames_nothing(name: str) -> None:
    small = imported(name, 1).graph
    large = imported(name, 2).graph
    fresh = {op.name for op in large.operators} - {op.name for op in small.operators}
    assert {op.name for op in small.operators} <= {op.name for op in large.operators}
    assert fresh and all(".1." in name or ".1/" in name for name in fresh), sorted(fresh)
    prints = {op.name: small.operator_fingerprint(op) for op in small.operators}
    assert all(
        large.operator_fingerprint(op) == prints[op.name]
        for op in large.operators
        if op.name in prints
    )
    assert {t.name for t in small.parameters} <= {t.name for t in large.parameters}


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_computes_what_the_module_computes(name: str) -> None:
    module = MODELS[name](1)
    actual = import_torch(module, (), inputs(name))
    analyse(actual.graph, train=False)
    values = {**actual.constants, **dict(module.named_buffers()), **dict(module.named_parameters())}
    local = ParallelModule(one_device(actual.graph), DeviceGroups.single(), values)
    with torch.no_grad():
        wanted = [value for value in module(**inputs(name)).values() if isinstance(value, Tensor)]
        torch.testing.assert_close(list(local(*inputs(name).values())), wanted)


def test_gpt2_ties_its_head_to_its_table() -> None:
    model = imported("gpt2", 1)
    assert model.aliases == {"lm_head.weight": "transformer.wte.weight"}
    assert "lm_head.weight" not in model.graph.tensors


def test_every_parameter_of_the_module_is_in_the_graph() -> None:
    module = llama(2)
    graph = import_torch(module, (), inputs("llama")).graph
    assert {t.name: t.shape for t in graph.parameters} == {
        name: tuple(p.shape) for name, p in module.named_parameters()
    }
    assert all(t.trainable for t in graph.parameters)
    rotary = [t for t in graph.tensors.values() if t.role is Role.CONSTANT]
    assert {t.name for t in rotary} >= {"model.rotary_emb.inv_freq"}


def test_a_model_of_70_billion_parameters_on_the_meta_device_takes_no_memory() -> None:
    config = tf.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        num_hidden_layers=4,
        vocab_size=128256,
        use_cache=False,
        torch_dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        module = tf.LlamaForCausalLM(config).to(torch.bfloat16)
        ids = torch.zeros(4, 4096, dtype=torch.int64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    loaded = load_model(module, ModelOptions(), {"input_ids": ids})
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    layer = sum(t.bytes for t in loaded.graph.parameters if "layers.0." in t.name)
    assert layer > 1.6e9 and grown < 0.25 * layer
    assert loaded.graph.tensors[loaded.graph.outputs[0]].shape == (4, 4096, 128256)
    assert all(p.is_meta for p in module.parameters())
