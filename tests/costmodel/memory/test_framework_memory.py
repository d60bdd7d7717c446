"""Memory of plans for another framework: what its kernels, its recompute and its optimizer keep."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from autopar.api import plan_loaded
from autopar.costmodel import load_cluster
from autopar.costmodel.frameworks import AUTOPAR, LOSSES, Framework, Habits, Kernels
from autopar.costmodel.memory.peak import Memory, predicted_memory
from autopar.costmodel.step.mesh_prices import storage_bytes
from autopar.ir import Graph
from autopar.ir.recipes import RECIPES, with_precision
from autopar.model import LoadedModel
from autopar.planning.model.folded_model import FoldedModel
from autopar.planning.model.request import Request
from autopar.raising import raised
from autopar.schemes import scheme_named
from autopar.schemes.pinning import pinned
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.program import Program
from autopar.sharding.rules import Call
from autopar.sharding.rules.experts import EXPERTS
from autopar.sharding.rules.saved_for_backward import TORCH, Saving, keeps
from autopar.sharding.schedule import PLAIN, Schedule, Types
from benchmarks.validating.known import Shape
from benchmarks.validating.known.transformer import transformer
from tests.costmodel.on_mesh import best_on_mesh

SHAPE = Shape(
    layers=4, hidden=256, heads=4, kv_heads=4, ffn=1024, vocab=512, sequence=128, dropout=False
)
BATCH = 8
TOKENS = BATCH * SHAPE.sequence
ROW = 2 * SHAPE.hidden
"""Bytes of a token's row of 16-bit elements."""
WIDE = Types(master="float32", reduce="float32")


def graph_of(shape: Shape, *, wide_loss: bool = True) -> Graph:
    return raised(transformer(shape, batch=BATCH, kernels=Kernels(wide_loss=wide_loss)).graph)


def laid_out(graph: Graph, scheme: str = "", devices: int = 1) -> tuple[Program, Analysis]:
    """The program of a graph under a scheme, and its analysis."""
    analysis = analyse(graph, train=True)
    cluster = load_cluster("dgx-h100").sized(devices)
    mesh = Mesh(axes=(Axis(name="gpu", size=devices, level=cluster.levels[0].name),))
    request = Request(cluster=cluster, mesh=mesh, memory=math.inf, types=WIDE)
    if scheme:
        request = pinned(request, scheme_named(scheme), analysis)
    return best_on_mesh(analysis, mesh, request).program, analysis


def memory_of(made: tuple[Program, Analysis], schedule: Schedule = PLAIN, **habits: Any) -> Memory:
    """The memory of a program as a framework of these habits runs it."""
    program, analysis = made
    work = Framework(name="another", habits=Habits(**habits))
    schedule = replace(schedule, types=WIDE)
    return predicted_memory(program, analysis, optimizer="adamw", framework=work, schedule=schedule)


# --- kernels ---


def test_one_kernel_between_products_of_experts_keeps_what_the_first_makes() -> None:
    """The gate's result is made again, and scores are multiplied inside: of a row stay its copy,
    both halves and their product.
    """
    shape = replace(SHAPE, gated=True, bias=False, experts=8, top_k=2, expert_ffn=256)
    graph = graph_of(shape)
    call = Call.of(graph, next(op for op in graph.operators if op.kind == EXPERTS))
    assert call.position("scores") is not None
    elements = call.outputs[0].size
    apart, fused = (
        elements * sum(m.nbytes for m in keeps(call, [True] * len(call.inputs), saving).made)
        for saving in (TORCH, Saving(fused=True))
    )
    rows = TOKENS * 2
    beside = 2 * 8 + 2  # two places of a row, and its score
    assert fused == rows * (2 * (shape.hidden + 3 * 256) + beside)
    gone = rows * 2 * (256 + shape.hidden)
    assert apart - fused == gone
    made = laid_out(graph)
    assert memory_of(made).saved - memory_of(made, fused=True).saved == shape.layers * gone


@pytest.mark.parametrize("recipe", ["fp8", "fp8-block"])
def test_a_narrow_product_keeps_its_rows_narrow(recipe: str) -> None:
    graph = graph_of(SHAPE)
    narrow = with_precision(graph, recipe)
    down = next(op for op in narrow.operators if op.name.startswith("layers.1.mlp.down"))
    own = keeps(Call.of(narrow, down), [True] * len(down.inputs))
    assert 0 not in own.inputs
    assert [(made.position, made.nbytes) for made in own.made] == [(0, RECIPES[recipe].bytes)]
    less = memory_of(laid_out(graph)).saved - memory_of(laid_out(narrow)).saved
    # Of the operands of four products a layer, attention keeps its own result as it is.
    operands = 2 * SHAPE.hidden + SHAPE.ffn
    assert less > SHAPE.layers * TOKENS * (operands - SHAPE.hidden)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("tensor", [1, 2])
def test_a_loss_has_alive_what_its_kernels_have(name: str, tensor: int) -> None:
    """Beside what a loss of another framework has, where the scores are most of all bytes."""
    shape = replace(SHAPE, layers=2, vocab=16384)
    scores = TOKENS * shape.vocab / tensor
    loss = LOSSES[name]
    made = laid_out(
        graph_of(shape, wide_loss=loss.wide), "megatron 2" if tensor > 1 else "", tensor
    )
    least = next(n for n, other in LOSSES.items() if other.wide == loss.wide)
    told, other = (memory_of(made, loss=one).total for one in (name, least))
    expected = (loss.at_most - LOSSES[least].at_most) * scores
    # With 2 bytes of a score the gradients of the head's product are more.
    assert told - other == pytest.approx(expected, rel=0.3 if loss.at_most == 2 else 1e-9)


# --- what is recomputed, or gathered again ---


def test_operators_that_are_not_recomputed_keep_what_they_make() -> None:
    made = laid_out(graph_of(SHAPE))
    folded = FoldedModel(made[1].graph, train=True)

    def saved(recompute: str, *, outputs: bool) -> Memory:
        schedule = Schedule(recompute=folded.segments(recompute, short=False, all_named=True))
        return memory_of(made, schedule, saves_outputs=outputs)

    none, some, full = (saved(how, outputs=True) for how in ("none", "alternate", "full"))
    assert none.total > some.total > full.total
    # Queries, keys and values, attention, and the first product behind it.
    outputs = 2 * (3 * SHAPE.hidden + SHAPE.hidden + SHAPE.ffn)
    assert some.saved - full.saved == SHAPE.layers * TOKENS * outputs
    assert some.saved < saved("alternate", outputs=False).saved, "what others read is made again"


def test_results_that_are_given_up_are_made_again_by_their_readers() -> None:
    """A norm's result is as large as its input, which the residual keeps anyway."""
    made = laid_out(graph_of(SHAPE))
    segments = tuple((f"layers.{layer}.norm{n}",) for layer in range(4) for n in (1, 2))
    stay, go = (
        memory_of(made, Schedule(recompute=segments), discards_outputs=flag)
        for flag in (False, True)
    )
    # The mean and the deviation of a row stay with the latter.
    assert stay.saved - go.saved == SHAPE.layers * 2 * TOKENS * (ROW - 2 * 4)
    assert go.total < stay.total


def test_what_is_gathered_again_is_kept_in_shards() -> None:
    made = laid_out(graph_of(SHAPE), "megatron-sp 4", 4)
    whole, shards = (memory_of(made, regather=flag) for flag in (False, True))
    gathered = 2 * SHAPE.layers + 1  # rows before attention and feed-forward parts, and the head
    assert whole.saved - shards.saved == gathered * TOKENS * ROW * 3 / 4
    assert shards.total < whole.total


# --- the optimizer ---


@pytest.mark.parametrize("state_bytes", [8, 10, 16])
@pytest.mark.parametrize(("scheme", "devices"), [("", 1), ("zero3 4", 4)])
def test_states_have_the_bytes_of_the_framework(
    scheme: str, devices: int, state_bytes: int
) -> None:
    made = laid_out(graph_of(SHAPE), scheme, devices)
    stored = sum(
        tensor.size / (devices if "S" in str(made[0].assignment.storage[tensor.name]) else 1)
        for tensor in made[1].graph.parameters
    )
    usual, own = (memory_of(made, state_bytes=size) for size in (12, state_bytes))
    assert own.optimizer - usual.optimizer == pytest.approx((state_bytes - 12) * stored)
    assert own.master == usual.master == pytest.approx(4 * stored)
    assert usual.optimizer == pytest.approx(
        predicted_memory(
            *made, optimizer="adamw", framework=AUTOPAR, schedule=Schedule(types=WIDE)
        ).optimizer
    ), "two moments of float32"


@pytest.mark.parametrize("types", [WIDE, PLAIN.types], ids=["float32 masters", "no masters"])
def test_tables_count_the_states_that_the_program_has(types: Types) -> None:
    made = laid_out(graph_of(SHAPE))
    work = Framework(name="another", habits=Habits(state_bytes=10))
    schedule = Schedule(types=types)
    told = predicted_memory(*made, optimizer="adamw", framework=work, schedule=schedule)
    one = np.ones(1, dtype=np.int64)

    def stored(optimizer: str) -> float:
        return sum(
            float(storage_bytes(t, one, optimizer, train=True, types=types, moment=work.moment)[0])
            for t in made[1].graph.parameters
        )

    assert told.optimizer == pytest.approx(stored("adamw") - stored("sgd"))


def test_products_that_add_to_sums_make_no_gradients_of_weights() -> None:
    graph = graph_of(SHAPE)
    model = LoadedModel(graph=graph, source=graph, dtype="bfloat16")

    def stages(**habits: Any) -> list[float]:
        work = Framework(name="another", habits=Habits(**habits))
        cluster = load_cluster("dgx-h100").sized(2).run_by(work)
        plan = plan_loaded(
            model, cluster=cluster, scheme="pipeline-1f1b 2", stages=2, micro_batches=4
        ).plan
        return [stage.memory for stage in plan.stages]

    for apart, added in zip(stages(), stages(fused_accumulation=True), strict=True):
        assert added <= apart
    assert sum(stages(fused_accumulation=True)) < sum(stages())
    made = laid_out(graph)
    assert memory_of(made, fused_accumulation=True).total <= memory_of(made).total
