"""Graphs of known models: the layers and parameters of every kind."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel.frameworks import Kernels
from autopar.errors import UsageError
from benchmarks.validating.known import Latent, Shape
from benchmarks.validating.known.shape import StateSpace
from benchmarks.validating.known.transformer import transformer
from tests.benchmarks.known.hybrid import HYBRID

GPT = Shape(
    layers=2, hidden=512, heads=8, kv_heads=8, ffn=2048, vocab=4096, sequence=256, dropout=False
)


def parameters(shape: Shape) -> int:
    return sum(t.size for t in transformer(shape, batch=1).graph.parameters)


def test_every_letter_of_a_pattern_is_a_layer_of_its_own() -> None:
    kinds = ("state", "dense alone", "state", "attention alone", "state", "experts alone")
    assert HYBRID.kinds() == kinds
    ends = 2 * 4096 * 1024 + 1024  # embedding and head, and the last norm
    mixer = 1024 * (3 * 2048 + 2 * 8 * 128 + 32) + 2048  # in, out and the weight of the gated norm
    one = parameters(replace(HYBRID, layers=1, pattern="M"))
    assert one - ends - 1024 == pytest.approx(mixer, rel=0.01)
    apart = sum(parameters(replace(HYBRID, layers=1, pattern=letter)) for letter in HYBRID.pattern)
    assert parameters(HYBRID) == apart - 5 * ends, "the ends once"


def test_experts_may_work_in_fewer_dims_than_the_model() -> None:
    narrow = replace(HYBRID, expert_hidden=256)
    less = 16 * 2 * 512 * (1024 - 256) - 2 * 1024 * 256
    assert parameters(HYBRID) - parameters(narrow) == less


def test_modules_that_predict_further_have_layers_of_a_pattern() -> None:
    none, two = (parameters(replace(HYBRID, mtp=n, mtp_pattern="*E")) for n in (0, 2))
    extra = parameters(replace(HYBRID, layers=2, pattern="*E")) - 2 * 4096 * 1024 - 1024
    assert two - none == 2 * (extra + 2 * 1024 * 1024 + 3 * 1024)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"pattern": "M-M*"}, "4 layers, not 6"),
        ({"pattern": "M-M*MX"}, "X"),
        ({"state": None}, "their sizes"),
        ({"experts": 0}, "their number"),
    ],
)
def test_patterns_that_say_too_little_are_refused(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        replace(HYBRID, **changed)


def test_heads_that_do_not_make_equal_groups_are_refused() -> None:
    with pytest.raises(UsageError, match="equal groups"):
        StateSpace(heads=6, width=64, size=128, groups=4)


def test_a_decoder_reads_its_encoder_and_patches_have_no_vocabulary() -> None:
    t5 = replace(GPT, encoder_layers=3, encoder_sequence=512, position="none")
    model = transformer(t5, batch=2)
    assert model.kinds == ("encoder",) * 3 + ("dense",) * 2
    assert sum(op.name.endswith("cross.core") for op in model.graph.operators) == 2
    cores = [op for op in model.graph.operators if op.name.endswith(".core")]
    assert [op.attributes["is_causal"] for op in cores] == [False] * 3 + [True, False] * 2
    vit = transformer(replace(GPT, patch=16, causal=False, sequence=196, vocab=1000), batch=2).graph
    assert {vit.tensors[name].shape for name in vit.inputs} == {(2, 196, 768), (2,)}


def test_latent_attention_goes_through_its_ranks() -> None:
    latent = Latent(kv_rank=128, q_rank=256, nope=64, rope=32, value=64)
    model = transformer(replace(GPT, bias=False, latent=latent), batch=1).graph
    weights = {t.name: t.shape for t in model.parameters if t.name.startswith("layers.0.attention")}
    names = ("q_down", "query", "kv_down", "kv_up", "out")
    assert [weights[f"layers.0.attention.{name}.weight"] for name in names] == [
        (256, 512),
        (8 * 96, 256),
        (128 + 32, 512),
        (8 * 128, 128),
        (512, 8 * 64),
    ]


def test_scores_in_float32_are_neither_copied_nor_narrowed() -> None:
    def chain(dtype: str) -> set[str]:
        kernels = Kernels(attention="unfused")
        graph = transformer(replace(GPT, layers=1), batch=1, dtype=dtype, kernels=kernels).graph
        names = (op.name for op in graph.operators if ".core." in op.name)
        return {name.rpartition(".")[2] for name in names}

    assert chain("float16") - chain("float32") == {"copy", "narrow"}
