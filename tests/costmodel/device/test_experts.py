"""Layers of experts in the cost model: products shared out evenly, what autograd keeps under every
split, and the tracked peak.
"""

from __future__ import annotations

import importlib
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from autopar.costmodel import load_cluster
from autopar.costmodel.device.expert_layers import Layer
from autopar.costmodel.device.operator_seconds import operator_parts
from autopar.costmodel.memory.peak import predicted_memory
from autopar.frontends.load import ModelOptions, load_model
from autopar.runtime.lowering.localise import localise
from autopar.runtime.operators.functions import arguments_of
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.proof import Sample, sample, shard, strategies
from autopar.sharding.analysis import analyse
from autopar.sharding.notation import local_elements
from autopar.sharding.program import Decision
from autopar.sharding.rules import Call
from autopar.sharding.rules.experts import PRODUCTS, multiply_adds
from autopar.sharding.rules.saved_for_backward import keeps
from autopar.sharding.strategies import Strategies
from benchmarks.memory import planned
from benchmarks.tracked_memory import fake_world, track_program

PRODUCT = "transformers.grouped_mm_fallback.default"
TOKENS = 48
CHOSEN = 2
EXPERTS = 4
HIDDEN = 16
INNER = 24


def _layer() -> Sample:
    """Every expert has as many rows, in every half of the tokens too."""
    importlib.import_module("transformers.integrations.moe")
    wide = (2 * INNER, "float32", "(!c2=2 f)")
    narrow = (INNER, "float32", "f")
    last = (HIDDEN, "float32", "!o")
    network = (
        (PRODUCT, (("input", "%rows"), ("weight", "%w0"), ("offs", "%ends")), (wide,)),
        ("aten.chunk.default", (("self", "%0"), ("chunks", 2), ("dim", -1)), (narrow, narrow)),
        ("aten.silu.default", (("self", "%1"),), (narrow,)),
        ("aten.mul.Tensor", (("self", "%3"), ("other", "%2")), (narrow,)),
        (PRODUCT, (("input", "%4"), ("weight", "%w1"), ("offs", "%ends")), (last,)),
    )
    chosen = torch.arange(TOKENS * CHOSEN) % EXPERTS
    weights = [torch.randn(EXPERTS, HIDDEN, 2 * INNER), torch.randn(EXPERTS, INNER, HIDDEN)]
    return sample(
        "autopar.experts",
        rows=torch.randn(TOKENS, HIDDEN),
        chosen=chosen,
        operands=weights,
        network=network,
    )


def _of(case: Sample, mesh: tuple[int, ...]) -> tuple[Call, Strategies, dict[str, int]]:
    table = strategies(case, mesh)
    names = {" ".join(table.names(i)): i for i in range(len(table.choices))}
    return Call.of(case.graph, case.operator), table, names


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
def test_every_split_shares_out_the_products(mesh: tuple[int, ...]) -> None:
    """As many multiply-adds on every rank as there are in all, divided by the ranks that split
    something.
    """
    case = _layer()
    call, work, names = _of(case, mesh)
    sizes = np.array([factor.size for factor in work.rule.factors], dtype=np.float64)
    layer = Layer(
        call, work, mesh, sizes / work.degrees(mesh), load_cluster("dgx-h100"), frozenset()
    )
    products = [layer._product(inner) for inner in layer.network if inner.kind in PRODUCTS]
    done = sum(p.batch * p.m * p.n * p.k for p in products)
    assert multiply_adds(call) == TOKENS * CHOSEN * (HIDDEN * 2 * INNER + INNER * HIDDEN)
    for name, index in names.items():
        ranks = np.prod(
            [
                size
                for size, option in zip(mesh, name.split(), strict=True)
                if option not in ("R", "B")
            ]
        )
        assert done[index] == pytest.approx(multiply_adds(call) / ranks), name


def test_time_falls_with_the_ranks() -> None:
    """On sizes where arithmetic is what takes time, half of the layer takes about half of it,
    forward and backward.
    """
    case = _layer()
    call, work, names = _of(case, (2,))
    device = load_cluster("p3.16xlarge")
    gradients = frozenset(case.operator.inputs) | frozenset(case.operator.outputs)
    parts = operator_parts(call, work, (2,), device, gradients)
    whole = names["R"]
    split = [names[name] for name in ("t", "e", "e+t", "f")]
    assert (parts.forward[split] <= parts.forward[whole] * 1.01).all() and (
        parts.backward[split] < parts.backward[whole] * 1.01
    ).all()
    assert parts.backward[whole] > parts.forward[whole] > 0


@pytest.mark.parametrize("option", ["R", "t", "e", "f"])
def test_saved_bytes_are_those_of_autograd(option: str) -> None:
    """Distinct memories that autograd holds on one rank, beside those of its inputs."""
    case = _layer()
    mesh = (2,)
    call, work, names = _of(case, mesh)
    index = names[option]
    inputs, outputs = work.layouts(index)
    chosen = tuple(work.options[o] for o in work.choices[index])
    decision = Decision(options=chosen, rule=work.rule, inputs=inputs, outputs=outputs)
    local = localise(
        LocalCall(
            operator=case.operator,
            decision=decision,
            inputs=call.inputs,
            outputs=call.outputs,
            mesh=mesh,
            coordinate=(0,),
        )
    )
    leaves = [
        shard(v, layout, mesh, (0,)).contiguous()
        for v, layout in zip(case.values, inputs, strict=True)
    ]
    leaves = [leaf.requires_grad_() if leaf.is_floating_point() else leaf for leaf in leaves]
    given = {leaf.untyped_storage().data_ptr() for leaf in leaves}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        local.function(
            **arguments_of(local.function, local.attributes, leaves, torch.device("cpu"))
        )
    kept = keeps(call, [True, False, True, True])
    sizes = np.array([factor.size for factor in work.rule.factors]) / work.degrees(mesh)
    elements = local_elements(work.rule.outputs[0], sizes)[index]
    told = sum(
        elements * made.nbytes / work.plain_degree(mesh, made.factors)[index] for made in kept.made
    )
    beside = (
        8 * TOKENS * CHOSEN
    )  # numbers of experts, and the whole order where a part of it is kept
    assert told == pytest.approx(
        sum(size for place, size in held.items() if place not in given), abs=beside
    )
    assert kept.inputs == (2, 3)


class _Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return output


def _mixtral(**sizes: Any) -> Any:
    library = import_module("transformers")
    config = library.MixtralConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        vocab_size=512,
        num_local_experts=4,
        num_experts_per_tok=2,
        **sizes,
    )
    model = _Logits(
        library.AutoModelForCausalLM.from_config(config, experts_implementation="grouped_mm")
    )
    return load_model(
        model, ModelOptions(train=True, dtype="float32"), (torch.zeros(4, 256, dtype=torch.int64),)
    )


@pytest.mark.parametrize(("scheme", "ranks"), [("found", 1), ("data", 4)])
def test_peak_of_a_model_as_tracked(scheme: str, ranks: int) -> None:
    analysis = analyse(_mixtral().graph, train=True)
    program = planned(analysis, scheme, (ranks,))
    told = predicted_memory(program, analysis, optimizer="adamw", composite=True)
    with fake_world(ranks):
        tracked = track_program(program)
    assert told.saved == pytest.approx(tracked.saved, rel=0.05)
    assert told.total == pytest.approx(tracked.peak, rel=0.06)
