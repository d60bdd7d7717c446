"""Prices of runs by their degrees, schedules and recompute."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.frameworks import Habits, Kernels
from autopar.errors import UsageError
from autopar.planning.model.recompute import modules_of
from benchmarks.validating.configuration import Configuration
from benchmarks.validating.known import Latent, Shape
from benchmarks.validating.known.shape import StateSpace
from benchmarks.validating.priced import Priced, model_of_run, plan_of_run, price

CLUSTER = load_cluster("dgx-h100")
SHAPE = Shape(
    layers=4, hidden=1024, heads=8, kv_heads=8, ffn=4096, vocab=4096, sequence=1024, dropout=False
)
MIXTURE = replace(
    SHAPE,
    layers=2,
    gated=True,
    bias=False,
    experts=16,
    expert_ffn=512,
    norm="rms_norm",
    position="rotary",
    tied=False,
)
# Models this small are bound by their kernels only where the host runs ahead.
AHEAD = Habits(compiled=True)


def priced(shape: Shape = SHAPE, cluster: Cluster = CLUSTER, **given: Any) -> Priced:
    return price(shape, Configuration(**({"habits": AHEAD} | given)), cluster)


def test_passes_of_stages_are_those_of_a_micro_batch() -> None:
    few, many = (priced(global_batch=size, micro_batch=8, pipeline=2) for size in (8, 256))
    assert many.step > 10 * few.step
    assert many.forward == pytest.approx(few.forward, rel=0.02)


# --- recompute ---


def test_full_recompute_repeats_the_forward_pass_and_keeps_little() -> None:
    shape = replace(SHAPE, vocab=64)
    none, full = (
        priced(shape, global_batch=64, micro_batch=8, recompute=name) for name in ("none", "full")
    )
    assert full.forward == none.forward
    more = full.backward[0] - none.backward[0]
    assert 0.9 * none.forward[0] < more < 1.1 * none.forward[0]
    assert full.memory < 0.8 * none.memory


def test_selective_recompute_repeats_the_scores_alone() -> None:
    kernels = Kernels(attention="fused")
    none, some, full = (
        priced(global_batch=8, micro_batch=8, kernels=kernels, recompute=name)
        for name in ("none", "selective", "full")
    )
    assert none.backward[0] < some.backward[0] < full.backward[0]
    assert none.memory > some.memory > full.memory


@pytest.mark.parametrize(
    ("module", "given"),
    [
        ("core_attn", {}),
        ("core_attn", {"attention": "fused"}),
        ("layernorm", {}),
        ("mlp", {}),
        ("mla_up_proj", {"latent": Latent(kv_rank=128, q_rank=256, nope=64, rope=64, value=128)}),
        ("moe", {"experts": 8}),
        ("shared_experts", {"experts": 8, "shared_ffn": 512}),
    ],
)
def test_modules_that_runs_name_are_in_their_graphs(module: str, given: dict[str, Any]) -> None:
    sizes = {name: value for name, value in given.items() if name != "attention"}
    kernels = Kernels(attention=given.get("attention", "flash2"))
    shape = replace(SHAPE, bias=False, **sizes)
    model = model_of_run(shape, Configuration(global_batch=8, kernels=kernels), CLUSTER)
    assert modules_of(model.graph, [module]) == (module,)


# --- pipelines ---


def test_a_pipeline_of_equal_stages_takes_its_bubble() -> None:
    shape = replace(SHAPE, vocab=64)
    habits = replace(AHEAD, overlap_sends=True)
    alone = priced(shape, global_batch=16, habits=habits)
    split = priced(shape, global_batch=16, pipeline=4, habits=habits)
    assert split.step == pytest.approx(alone.step / 4 * (16 + 3) / 16, rel=0.06)
    chunks = replace(shape, layers=8)
    whole, interleaved = (
        priced(chunks, global_batch=16, pipeline=4, interleave=n, habits=habits).step
        for n in (1, 2)
    )
    # Half a bubble less.
    assert interleaved / whole == pytest.approx((16 + 1.5) / (16 + 3), rel=0.02)


def test_a_stage_of_more_layers_takes_and_holds_more() -> None:
    even, uneven = (priced(global_batch=16, pipeline=2, dealt=d) for d in ((2, 2), (3, 1)))
    layout = ("Ettt", "tL")
    assert priced(global_batch=16, pipeline=2, layout=layout) == uneven
    assert uneven.forward[0] > 1.4 * even.forward[0] and uneven.forward[1] < even.forward[1]
    assert uneven.allocated[0] > even.allocated[0] > even.allocated[1] > uneven.allocated[1]
    assert uneven.step > even.step


def test_ends_of_a_model_may_have_a_stage_alone() -> None:
    apart, together = (
        priced(global_batch=16, pipeline=len(layout), layout=layout)
        for layout in (("E", "tt", "tt", "L"), ("Ett", "ttL"))
    )
    assert max(apart.forward[0], apart.forward[3]) < 0.3 * apart.forward[1]
    assert together.forward == pytest.approx(
        (apart.forward[0] + apart.forward[1], apart.forward[2] + apart.forward[3]), rel=0.02
    )


# --- data ---


def test_zero_3_sends_more_and_holds_less() -> None:
    habits = replace(AHEAD, prefetch=False)
    whole, states, shards = (
        priced(global_batch=64, micro_batch=4, data=8, zero=zero, habits=habits)
        for zero in (0, 1, 3)
    )
    # Two gathers of the weights and one scatter of the gradients, where an all-reduce is two.
    assert shards.step > 1.1 * whole.step
    assert whole.memory > states.memory > shards.memory


def test_groups_that_share_out_keep_gathers_inside_a_node() -> None:
    port = replace(CLUSTER.levels[-1], bandwidth=1e9)
    slow = replace(CLUSTER, levels=(*CLUSTER.levels[:-1], port))
    run = {"global_batch": 64, "micro_batch": 4, "data": 16, "zero": 3}
    node, half, every = (priced(cluster=slow, shards=shards, **run) for shards in (8, 16, 0))
    assert half == every
    assert node.step < 0.8 * every.step and node.memory > every.memory


# --- tensors and sequences ---


def test_shards_of_the_sequence_keep_less_than_whole_rows() -> None:
    run = {"global_batch": 16, "micro_batch": 4}
    alone = priced(**run)
    whole, shards = (priced(tensor=4, sequence_parallel=split, **run) for split in (False, True))
    assert alone.memory > whole.memory > shards.memory
    assert alone.backward[0] > whole.backward[0]


def test_ranks_of_a_context_share_out_sequences_and_states() -> None:
    run = {"global_batch": 8, "tensor": 2, "sequence_parallel": True}
    alone, split, shared = (
        priced(context=context, zero=zero, **run) for context, zero in ((1, 0), (4, 0), (4, 1))
    )
    assert alone.memory > split.memory > shared.memory
    long = replace(SHAPE, sequence=32768)
    ring, heads, whole = (
        priced(long, global_batch=1, context=context, context_by=way).step
        for context, way in ((4, "ring"), (4, "heads"), (1, "ring"))
    )
    assert ring != heads and max(ring, heads) < 0.5 * whole


def test_windows_make_attention_cheaper() -> None:
    long = replace(SHAPE, sequence=16384)
    window = replace(long, window=512)
    assert priced(window, global_batch=1).step < 0.7 * priced(long, global_batch=1).step


@pytest.mark.parametrize("tensor", [2, 4])
def test_groups_of_a_state_space_are_split(tensor: int) -> None:
    shape = replace(
        MIXTURE,
        layers=4,
        pattern="M-*E",
        state=StateSpace(heads=32, width=64, size=128, groups=8),
        position="none",
    )
    run = {"global_batch": 8, "micro_batch": 8}
    one, split = (priced(shape, tensor=n, sequence_parallel=n > 1, **run) for n in (1, tensor))
    # Small products are less efficient, and rows are gathered and scattered.
    assert split.forward[0] < one.forward[0] * (0.45 + 1 / tensor)
    assert split.allocated[0] < 1.5 * one.allocated[0] / tensor


# --- experts ---


def test_experts_lie_on_their_ranks() -> None:
    """With 18 bytes of a weight, its master, moments and gradient (Megatron-LM's count)."""
    run = {"global_batch": 128, "micro_batch": 8, "data": 8}
    whole, *shared = (priced(MIXTURE, expert=n, **run).memory for n in (1, 2, 4, 8))
    weights = 2 * 18 * 3 * 1024 * 512
    for ranks, memory in zip((2, 4, 8), shared, strict=True):
        assert whole - memory == pytest.approx(16 * weights * (1 - 1 / ranks), rel=0.03)


def test_experts_cost_by_the_rows_that_they_are_given() -> None:
    run = {"global_batch": 64, "micro_batch": 8, "data": 8, "expert": 8}
    few, many = (priced(replace(MIXTURE, top_k=k), **run) for k in (2, 8))
    more = priced(replace(MIXTURE, experts=32, expert_ffn=512), **run)
    assert many.forward[0] > 1.3 * few.forward[0]
    assert more.forward[0] < 1.1 * few.forward[0], "as many rows"


def test_experts_of_tensor_parallel_ranks_are_whole_or_split() -> None:
    run = Configuration(global_batch=16, data=2, tensor=4, sequence_parallel=True)
    stored = []
    for expert, inner in ((8, 1), (2, 4)):
        c = replace(run, expert=expert, expert_tensor=inner)
        plan = plan_of_run(MIXTURE, c, CLUSTER)
        stored.append(plan.parameters["layers.0.experts.up.weight"].storage)
    assert stored == ["S0 S0", "S0 S2/2"], "up is gate and up"


def test_rows_travel_under_another_micro_batch() -> None:
    run = {"global_batch": 256, "micro_batch": 8, "data": 16, "expert": 16}
    alone, merged = (priced(MIXTURE, overlap_experts=flag, **run) for flag in (False, True))
    assert merged.step < 0.9 * alone.step
    assert merged.memory > alone.memory, "two are under way at once"


def test_stages_of_one_chunk_merge_no_passes() -> None:
    run = {"global_batch": 256, "micro_batch": 8, "data": 8, "expert": 8, "pipeline": 2}
    with pytest.raises(UsageError, match="chunks"):
        priced(MIXTURE, overlap_experts=True, **run)


def test_rows_that_go_once_to_a_node_move_less() -> None:
    run = {"global_batch": 128, "micro_batch": 8, "data": 16, "expert": 16}
    every, each, once = (
        priced(replace(MIXTURE, top_k=8), dispatcher=name, **run).step
        for name in ("allgather", "alltoall", "node")
    )
    assert once < min(each, every)


# --- errors ---


def test_degrees_that_do_not_divide_are_errors_that_name_the_operator() -> None:
    with pytest.raises(UsageError, match=r"layers\.0\..*cannot be split"):
        priced(global_batch=8, tensor=3)
    with pytest.raises(UsageError, match=r"8 pipeline stages, .* are more than the 4 layers"):
        priced(global_batch=8, pipeline=8)
    with pytest.raises(UsageError, match="layout has 0 layers, the model 4"):
        priced(global_batch=8, pipeline=2, layout=("E", "L"))


@pytest.mark.parametrize("dealt", [(3, 2), (2, 1, 1)])
def test_layers_are_dealt_to_the_chunks_that_there_are(dealt: tuple[int, ...]) -> None:
    with pytest.raises(UsageError):
        priced(global_batch=8, pipeline=2, dealt=dealt)
