"""Modes and modules of recompute: the operators that they name, and the bytes that they save."""

from __future__ import annotations

import functools
import itertools
import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autopar.analysis.searches.sensitivity import scaled_links
from autopar.configured import load_any
from autopar.costmodel import load_cluster
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions
from autopar.ir import Graph
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.recompute import MODULES, modules_of, read_recompute, stretches
from autopar.planning.model.request import Request
from autopar.planning.outer_search.candidate_solver import CandidateSolver
from autopar.planning.outer_search.evaluator import Evaluator
from autopar.planning.programs.priced_program import DraftProgram
from autopar.planning.space.candidates import Candidate
from autopar.planning.space.modes import Mode
from autopar.planning.stages.operator_costs import OperatorCosts, operator_costs
from autopar.planning.stages.parts import Part, Terms
from autopar.planning.stages.stage_memory import StageMemory
from autopar.schemes import scheme_named
from autopar.schemes.pinning import pinned

DENSE = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 512,
}
EXPERTS = DENSE | {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
}
LATENT = DENSE | {
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_hidden_layers": 6,
    "first_k_dense_replace": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 64,
    "n_shared_experts": 1,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
}
MODELS = {"dense": DENSE, "experts": EXPERTS, "latent": LATENT}
HAVE = {
    "dense": {"core_attn", "layernorm", "mlp"},
    "experts": {"core_attn", "layernorm", "moe"},
    "latent": {"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"},
}
CLUSTER = load_cluster("dgx-h100").sized(4)


@functools.cache
def graph_of(model: str) -> Graph:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODELS[model]))
        options = ModelOptions(batch=8, dims={"sequence": 64}, dtype="bfloat16")
        return load_any(f"hf:{folder}", options).graph


@functools.cache
def folded_of(model: str) -> FoldedModel:
    return FoldedModel(graph_of(model), train=True, folded=False)


@functools.cache
def part_of(model: str, scheme: str) -> tuple[CandidateSolver, Part]:
    """The program of the fastest strategies of a scheme without recompute."""
    folded = folded_of(model)
    analysis = folded.analysis(short=False)
    request = pinned(Request(cluster=CLUSTER, memory=1e18), scheme_named(scheme), analysis)
    solver = CandidateSolver(folded, request)
    assert request.mesh is not None
    candidate = Candidate(cluster=CLUSTER, stages=1, mesh=request.mesh, micro_batches=1)
    mode = Mode(zero=1, recompute="none")
    solved = Evaluator(solver).promise(solver.case(candidate, mode))
    assert solved is not None
    schedule = solver.schedule(mode, 1, [solved.tables.prices], short=True)
    terms = Terms(request=request, schedule=schedule, always=0.0)
    return solver, terms.part(solver.group(candidate), solved.tables, solved.solution)


def modes_of(model: str) -> list[str]:
    return ["selective", "full", *sorted(HAVE[model]), ",".join(sorted(HAVE[model]))]


@pytest.mark.parametrize("model", MODELS)
def test_modules_are_those_that_the_layers_have(model: str) -> None:
    assert set(modules_of(graph_of(model), MODULES)) == HAVE[model]
    runs = folded_of(model).runs
    for name in set(MODULES) - HAVE[model]:
        with pytest.raises(UsageError, match=f"layers have no {name}"):
            list(stretches(graph_of(model), runs, name))


def operators_of(model: str, name: str, layer: int) -> list[str]:
    every = (
        n for one in stretches(graph_of(model), folded_of(model).runs, name) for n in one.names
    )
    return [n.split(".", 3)[3] for n in every if n.startswith(f"model.layers.{layer}.")]


def test_modules_have_the_operators_of_their_names() -> None:
    assert operators_of("latent", "core_attn", 4) == ["self_attn/scaled_dot_product_attention"]
    norms = {name.split("/")[0] for name in operators_of("latent", "layernorm", 4)}
    assert norms == {"input_layernorm", "post_attention_layernorm"}
    up = {name.split("/")[0] for name in operators_of("latent", "mla_up_proj", 4)}
    latent = ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj")
    assert up == {"self_attn", *(f"self_attn.{name}" for name in latent)}
    assert not any("scaled" in name for name in operators_of("latent", "mla_up_proj", 4))
    # The first three layers are dense, the others of experts.
    assert any("gate_proj" in name for name in operators_of("latent", "mlp", 1))
    assert operators_of("latent", "mlp", 4) == operators_of("latent", "moe", 1) == []
    assert any("experts/experts" in name for name in operators_of("latent", "moe", 4))
    shared = operators_of("latent", "shared_experts", 4)
    assert shared and all("shared_experts" in name for name in shared)


@pytest.mark.parametrize("text", ["moe_act", "core_attn,", "most", "full,mlp"])
def test_an_unknown_word_lists_the_known_ones(text: str) -> None:
    with pytest.raises(UsageError, match="valid are none, selective, full, alternate, core_attn"):
        read_recompute(text)


PLANS = [
    ("dense", "data 4"),
    ("dense", "megatron 4"),
    ("dense", "data 2 x megatron-sp 2"),
    ("experts", "expert 4"),
    ("experts", "data 2 x expert 2"),
    ("latent", "expert 4"),
    ("latent", "megatron-sp 4"),
]


@pytest.mark.parametrize(("model", "scheme"), PLANS)
def test_recompute_never_raises_a_peak(model: str, scheme: str) -> None:
    """In any stage of whole layers, with the same strategies, whatever the schedule keeps."""
    solver, part = part_of(model, scheme)
    tables = part.tables
    begins = [layer.start for run in solver.folded.runs for layer in run.segments()]
    pieces = np.array([0, *begins, len(part.program.graph.operators)])

    def memory(recompute: str) -> StageMemory:
        mode = Mode(zero=1, recompute=recompute)
        schedule = solver.schedule(mode, 1, [tables.prices], short=True)
        figures = operator_costs(
            part.program, tables.analysis, tables.prices, optimizer="adamw", schedule=schedule
        )
        return StageMemory(figures, pieces)

    plain = memory("none")
    less = {recompute: memory(recompute) for recompute in modes_of(model)}
    for recompute, one in less.items():
        for i, j in itertools.combinations(range(len(pieces)), 2):
            # One layer with one micro-batch in flight holds what it makes either way.
            for flying in (2.0, 7.0) if (i, j) != (0, len(pieces) - 1) else (1.0, 2.0, 7.0):
                with_it, without = (m.of(flying, i, j)[0] for m in (one, plain))
                assert with_it <= without * (1 + 1e-9), (recompute, flying, i, j)
        whole = (7.0, 0, len(pieces) - 1)
        assert one.of(*whole)[0] <= plain.of(*whole)[0], recompute
    assert less["full"].of(*whole)[0] < plain.of(*whole)[0]


@pytest.mark.parametrize(("model", "scheme"), PLANS)
def test_nor_in_a_step_without_stages(model: str, scheme: str) -> None:
    solver, part = part_of(model, scheme)

    def draft(recompute: str) -> DraftProgram:
        mode = Mode(zero=1, recompute=recompute)
        schedule = solver.schedule(mode, 1, [part.tables.prices], short=True)
        return DraftProgram.of(replace(part.tables, optimizer="none"), part.solution, schedule)

    plain = draft("none").memory.total
    for recompute in modes_of(model):
        one = draft(recompute)
        # What saves nothing is not recomputed.
        assert one.memory.total < plain or (
            one.memory.total == plain and not one.plan.schedule.recompute
        )


@pytest.mark.parametrize(("model", "scheme"), PLANS[1:])
def test_collectives_that_are_recomputed_count_as_communication(model: str, scheme: str) -> None:
    """Slower links make communication longer alone, that of recomputed operators too."""
    solver, part = part_of(model, scheme)
    tables = part.tables
    mode = Mode(zero=1, recompute="full")
    schedule = solver.schedule(mode, 1, [tables.prices], short=True)

    def costs(factor: float) -> OperatorCosts:
        cluster = scaled_links(CLUSTER, CLUSTER.levels[0].name, factor)
        prices = replace(tables.prices, cluster=cluster)
        return operator_costs(
            part.program, tables.analysis, prices, optimizer="adamw", schedule=schedule
        )

    fast = costs(1.0)
    slow = costs(1e-3)
    assert slow.moved.sum() > 2 * fast.moved.sum()
    computed = [one.forward + one.backward - one.moved for one in (fast, slow)]
    assert computed[0] == pytest.approx(computed[1], rel=1e-6)


def test_every_second_product_is_saved() -> None:
    """torchtitan saves q, v, gate and down of q, k, v, o, gate, up and down, and attention."""
    again = operators_of("dense", "alternate", 1)
    products = [name for name in again if name.endswith("/linear")]
    assert [name.split("/")[0].split(".")[1][0] for name in products] == ["k", "o", "u"]
    assert not any("scaled_dot_product" in name for name in again)
    assert any("norm" in name for name in again)
