"""Predicted memory against torch's memory tracker, against what autograd really saves, and against
the formulas of the literature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from autopar.costmodel import load_cluster
from autopar.costmodel.frameworks import Kernels
from autopar.costmodel.memory.autograd_liveness import Autograd, live_bytes
from autopar.costmodel.memory.peak import autograd_memory, predicted_memory
from autopar.costmodel.memory.precision import PRECISIONS, Precision
from autopar.costmodel.memory.recompute import Recompute
from autopar.costmodel.memory.saved_values import facts_of, saved_values
from autopar.costmodel.memory.states import Training, states_of
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.ir import DTYPE_BYTES, Graph
from autopar.ir.dtype import cast_graph
from autopar.order.execution import execution
from autopar.planning.model.request import Request
from autopar.planning.tables.build import build_tables
from autopar.runtime.launch import run_ranks
from autopar.runtime.operators.functions import function_of
from autopar.schemes import scheme_named
from autopar.schemes.pinning import pinned
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import B, R, S
from autopar.sharding.mesh import Axis, Mesh
from autopar.sharding.program import Program, inputs_read
from autopar.sharding.redistribution import local_bytes
from autopar.sharding.rules.registry import Call
from autopar.sharding.rules.saved_for_backward import Saving, keeps
from autopar.sharding.schedule import Schedule, Types
from benchmarks.memory import Model, bert, gpt2, graph_of, llama, planned, resnet50, segments
from benchmarks.tracked_memory import Tracked, fake_world, track_module, track_program
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.costmodel.on_mesh import best_on_mesh
from tests.runtime.helpers import GraphBuilder

MODELS: dict[str, Callable[[], Model]] = {
    "gpt2": lambda: gpt2(layers=2, batch=2, sequence=256, vocab=2048),
    "llama": lambda: llama(layers=2, batch=2, sequence=256, vocab=2048),
    "bert": lambda: bert(layers=2, batch=4, sequence=128, vocab=2048, attention="eager"),
    "resnet50": lambda: resnet50(batch=4, size=96, depths=(1, 2, 1, 1)),
}
PLANS = {"gpt2": "megatron-sp", "llama": "zero3", "bert": "megatron", "resnet50": "data"}
"""What is run on four ranks; each scheme once."""

ADAMW = Training(optimizer="adamw")
COMPOSITE = Saving(composite=True)


# --- against the tracker ---


@pytest.fixture(scope="module", params=MODELS)
def subject(request: pytest.FixtureRequest) -> tuple[str, Model, Analysis, Any]:
    model = MODELS[request.param]()
    graph, module = graph_of(model)
    return request.param, model, analyse(graph, train=True), module


def test_one_device_as_tracked(subject: tuple[str, Model, Analysis, Any]) -> None:
    _, model, analysis, module = subject
    program = planned(analysis, "found", (1,))
    for recompute, parts in (
        (Recompute(), None),
        (segments(analysis.graph, module, model), model.parts),
    ):
        told = autograd_memory(
            program, analysis, ADAMW, Autograd(recompute=recompute), composite=True
        )
        tracked = track_module(model.make, model.inputs, recompute=parts)
        # The module runs as it is written: its norms, rotations and gates in pieces that keep more,
        # and so do activations that are spelled out. Programs of plans are tracked below.
        assert 0.8 * tracked.peak < told.total < 1.05 * tracked.peak
        # A small loss keeps more of its gradients than it would of its scores.
        assert 0.6 * tracked.saved < told.saved < 1.3 * tracked.saved


def test_one_rank_of_four_as_tracked(subject: tuple[str, Model, Analysis, Any]) -> None:
    name, _, analysis, _ = subject
    program = planned(analysis, PLANS[name], (4,))
    told = predicted_memory(program, analysis, optimizer="adamw", composite=True)
    with fake_world(4):
        tracked = track_program(program)
    assert told.total == pytest.approx(tracked.peak, rel=0.05)
    assert told.saved == pytest.approx(tracked.saved, rel=0.05)


@pytest.mark.slow
@pytest.mark.ci
def test_real_ranks_as_the_fake_one() -> None:
    analysis = analyse(graph_of(gpt2(layers=1, batch=4, sequence=16, vocab=64))[0], train=True)
    program = planned(analysis, "megatron-sp", (4,))
    told = predicted_memory(program, analysis, optimizer="adamw", composite=True)
    ranks = run_ranks(_tracked, 4, program, timeout=120.0)
    with fake_world(4):
        fake = track_program(program)
    for actual in ranks:
        assert actual.peak == pytest.approx(fake.peak, rel=0.01)
        assert told.total == pytest.approx(actual.peak, rel=0.05)


def _tracked(program: Program) -> Tracked:
    return track_program(program, fake=False)


def test_all_parameters_updated_at_once_as_tracked() -> None:
    """A model of hardly any activations, whose update makes the peak: the gradients are views of
    the messages that summed them.
    """
    analysis = analyse(graph_of(gpt2(layers=3, batch=4, sequence=4, vocab=64))[0], train=True)
    program = planned(analysis, "data", (4,))
    told = predicted_memory(program, analysis, optimizer="adamw")
    with fake_world(4):
        tracked = track_program(program, foreach=True)
    assert told.transient == told.gradients, (
        "foreach makes one temporary of the size of all gradients"
    )
    assert told.total == pytest.approx(tracked.peak, rel=0.05)


def test_parts_of_summed_gradients_as_tracked() -> None:
    """A gradient that is summed whole before it is cut keeps its own part, not the whole sum."""
    analysis = analyse(graph_of(gpt2(layers=3, batch=4, sequence=4, vocab=64))[0], train=True)
    scattered = planned(analysis, "zero1", (4,)).assignment
    chains = {
        name: tuple(((S(0),), (R,), (B,)) if one == ((S(0),), (B,)) else one for one in of)
        for name, of in scattered.chains.items()
    }
    summed = replace(scattered, chains=scattered.chains | chains)
    schedule = Schedule(unit_bytes=2**20, gathered="per_pass")
    peaks = []
    for assignment in (scattered, summed):
        plan = execution(assignment, analysis, schedule)
        told = predicted_memory(plan.micro, analysis, optimizer="adamw", composite=True)
        with fake_world(4):
            tracked = track_program(plan)
        assert told.total == pytest.approx(tracked.peak, rel=0.05)
        peaks.append(tracked.peak)
    assert peaks[1] == pytest.approx(peaks[0], rel=0.1)


@pytest.mark.parametrize("ranks", [1, 4])
def test_copies_of_whole_masters_as_tracked(ranks: int) -> None:
    """Parameters that no rank gathers are cast once, and the backward pass reads the copies."""
    wide = graph_of(gpt2(layers=3, batch=8, sequence=256, vocab=64))[0]
    graph = cast_graph(wide, "bfloat16")
    analysis = analyse(graph, train=True)
    program = planned(analysis, "data", (ranks,))
    types = Types(master="float32", reduce="float32")
    plan = execution(program.assignment, analysis, Schedule(types=types))
    told = predicted_memory(plan.micro, analysis, optimizer="adamw", composite=True)
    with fake_world(ranks):
        tracked = track_program(plan)
    assert told.total == pytest.approx(tracked.peak, rel=0.02)
    assert told.saved == pytest.approx(tracked.saved, rel=0.01), "copies are among what is saved"


@pytest.mark.parametrize("unit_mib", [1, 8, 512])
def test_flat_gradients_as_tracked(unit_mib: int) -> None:
    """The same without temporaries of the update: beside the gradients there is one message, of a
    unit, not a copy of them all.
    """
    analysis = analyse(graph_of(gpt2(layers=3, batch=4, sequence=4, vocab=64))[0], train=True)
    program = planned(analysis, "data", (4,))
    plan = execution(program.assignment, analysis, Schedule(unit_bytes=unit_mib * 2**20))
    told = predicted_memory(plan.micro, analysis, optimizer="adamw", composite=True)
    with fake_world(4):
        tracked = track_program(plan)
    assert told.total == pytest.approx(tracked.peak, rel=0.02)
    gradients = sum(t.bytes for t in program.graph.parameters)
    largest = max(sum(b.nbytes for b in unit.buckets) for unit in plan.micro.units)
    beside = told.total - told.parameters - told.optimizer - gradients
    update = 2 * max(t.bytes for t in program.graph.parameters)
    assert 0.9 * largest <= beside <= 1.1 * max(largest, update)


# --- what autograd saves ---


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, requires_grad=True)


_SQUARE = dict.fromkeys(("query", "key", "value"), (2, 3, 4, 8))
_QKV = {"query": (2, 3, 4, 8), "key": (2, 3, 6, 8), "value": (2, 3, 6, 8)}
KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("aten.linear.default", {"input": (4, 6, 8), "weight": (5, 8), "bias": (5,)}, {}),
    ("aten.addmm.default", {"self": (5,), "mat1": (4, 8), "mat2": (8, 5)}, {}),
    ("aten.bmm.default", {"self": (2, 4, 8), "mat2": (2, 8, 5)}, {}),
    ("aten.matmul.default", {"self": (2, 3, 4, 8), "other": (2, 3, 8, 5)}, {}),
    ("aten.mul.Tensor", {"self": (4, 8), "other": (4, 8)}, {}),
    ("aten.mul.Tensor", {"self": (4, 8)}, {"other": 2.0}),
    ("aten.div.Tensor", {"self": (4, 8), "other": (4, 8)}, {}),
    ("aten.add.Tensor", {"self": (4, 8), "other": (4, 8)}, {}),
    *(
        (f"aten.{name}.default", {"self": (4, 8)}, {})
        for name in (
            "relu",
            "gelu",
            "silu",
            "tanh",
            "sigmoid",
            "exp",
            "sqrt",
            "rsqrt",
            "reciprocal",
            "log",
            "abs",
            "erf",
            "sin",
            "neg",
            "softplus",
            "hardswish",
            "square",
            "mish",
        )
    ),
    ("aten.pow.Tensor_Scalar", {"self": (4, 8)}, {"exponent": 3.0}),
    ("aten.mean.dim", {"self": (4, 8)}, {"dim": (-1,)}),
    ("aten.sum.dim_IntList", {"self": (4, 8)}, {"dim": (-1,)}),
    ("aten.amax.default", {"self": (4, 8)}, {"dim": (-1,)}),
    ("aten.logsumexp.default", {"self": (4, 8)}, {"dim": (-1,)}),
    ("aten.softmax.int", {"self": (4, 8)}, {"dim": -1}),
    ("aten.log_softmax.int", {"self": (4, 8)}, {"dim": -1}),
    (
        "aten.layer_norm.default",
        {"input": (4, 6, 8), "weight": (8,), "bias": (8,)},
        {"normalized_shape": (8,)},
    ),
    ("aten.rms_norm.default", {"input": (4, 6, 8), "weight": (8,)}, {"normalized_shape": (8,)}),
    (
        "aten.group_norm.default",
        {"input": (4, 6, 8), "weight": (6,), "bias": (6,)},
        {"num_groups": 2},
    ),
    ("aten.dropout.default", {"input": (4, 8)}, {"p": 0.1, "train": True}),
    ("aten.dropout.default", {"input": (4, 8)}, {"p": 0.0, "train": True}),
    ("aten.scaled_dot_product_attention.default", _QKV, {}),
    ("autopar.attention.default", {**_QKV, "sinks": (3,), "attn_mask": (4, 6)}, {}),
    ("autopar.attention.default", {**_SQUARE, "sinks": (3,)}, {"is_causal": True, "window": 2}),
    ("aten.conv2d.default", {"input": (2, 3, 8, 8), "weight": (4, 3, 3, 3)}, {}),
    ("aten.max_pool2d.default", {"self": (2, 3, 8, 8)}, {"kernel_size": (2, 2), "stride": (2, 2)}),
    ("aten.avg_pool2d.default", {"self": (2, 3, 8, 8)}, {"kernel_size": (2, 2), "stride": (2, 2)}),
    ("aten.addcmul.default", {"self": (4, 8), "tensor1": (4, 8), "tensor2": (4, 8)}, {}),
]


@pytest.mark.parametrize(
    ("kind", "shapes", "fixed"), KINDS, ids=[f"{i}-{kind}" for i, (kind, _, _) in enumerate(KINDS)]
)
def test_saved_bytes_are_those_of_autograd(
    kind: str, shapes: dict[str, tuple[int, ...]], fixed: dict[str, Any]
) -> None:
    values = {name: _randn(*shape) for name, shape in shapes.items()}
    if kind in ("aten.sqrt.default", "aten.rsqrt.default", "aten.log.default"):
        values = {name: value.detach().abs().requires_grad_() for name, value in values.items()}
    held: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        held[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function_of(kind)(**values, **fixed)
    call, gradients = _call(kind, values, fixed, result)
    assert _kept_bytes(call, gradients) == pytest.approx(sum(held.values()), abs=8), (
        "a scalar may be kept beside"
    )


def _call(
    kind: str, values: dict[str, Tensor], fixed: dict[str, Any], result: Tensor
) -> tuple[Call, list[bool]]:
    builder = GraphBuilder("float32")
    names = {name: builder.input(name, *value.shape) for name, value in values.items()}
    builder.one(kind, tuple(result.shape), **names, **fixed)
    graph = Graph(
        name="one",
        tensors=builder.tensors,
        operators=tuple(builder.operators),
        inputs=tuple(names),
        outputs=(),
    )
    return Call.of(graph, builder.operators[0]), [True] * len(names)


def _kept_bytes(call: Call, gradients: Sequence[bool]) -> float:
    kept = keeps(call, gradients, COMPOSITE)
    total = sum(call.inputs[i].bytes for i in kept.inputs) + sum(
        call.outputs[i].bytes for i in kept.outputs
    )
    made = [
        (call.outputs if one.output else call.inputs)[one.position].size
        * one.nbytes
        # On one device nothing is passed on between shards.
        * float(one.times(1.0, 1))
        for one in kept.made
    ]
    return total + sum(made)


def test_a_product_keeps_only_what_the_other_gradient_needs() -> None:
    values = {"input": _randn(4, 8), "weight": torch.randn(5, 8)}
    call, _ = _call("aten.linear.default", values, {}, torch.empty(4, 5))
    assert keeps(call, [True, False]).inputs == (1,)
    assert keeps(call, [False, True]).inputs == (0,)
    assert keeps(call, [False, False]).inputs == ()


def test_fused_dropout_keeps_a_byte_for_each_element() -> None:
    call, flows = _call(
        "aten.dropout.default",
        {"input": _randn(4, 8)},
        {"p": 0.1, "train": True},
        torch.empty(4, 8),
    )
    assert [one.nbytes for one in keeps(call, flows).made] == [1.0]
    assert [one.nbytes for one in keeps(call, flows, COMPOSITE).made] == [4.0]


# --- against formulas ---

GPT = Shape(layers=1, hidden=256, heads=8, kv_heads=8, ffn=1024, vocab=512, sequence=64)


def _laid_out(
    tensor: int = 1, *, sequence: bool = False, layers: int = 1
) -> tuple[Program, Analysis]:
    """The program of so many layers on tensor-parallel devices, and its analysis."""
    kinds = ("dense",) * layers
    graph = transformer(GPT, batch=2, kernels=Kernels(attention="fused"), kinds=kinds).graph
    analysis = analyse(graph, train=True)
    cluster = load_cluster("dgx-a100").sized(tensor)
    mesh = Mesh(axes=(Axis(name="gpu", size=tensor, level=cluster.levels[0].name),))
    request = Request(cluster=cluster, mesh=mesh, memory=math.inf)
    if tensor > 1:
        name = "megatron-sp" if sequence else "megatron"
        request = pinned(request, scheme_named(f"{name} {tensor}"), analysis)
    return best_on_mesh(analysis, mesh, request).program, analysis


def _segments(analysis: Analysis, layers: int, word: str) -> Recompute:
    names = [op.name for op in analysis.graph.operators]
    return Recompute(
        segments=tuple(
            tuple(n for n in names if n.startswith(f"layers.{i}.") and word in n)
            for i in range(layers)
        )
    )


def _layer_bytes(tensor: int, *, sequence: bool, recompute: str | None = None) -> float:
    """The bytes that one more layer keeps."""
    results = []
    for layers in (1, 2):
        program, analysis = _laid_out(tensor, sequence=sequence, layers=layers)
        again = Recompute() if recompute is None else _segments(analysis, layers, recompute)
        memory = autograd_memory(
            program, analysis, ADAMW, Autograd(recompute=again, regather=sequence)
        )
        results.append(memory.saved)
    return results[1] - results[0]


@pytest.mark.parametrize("t", [1, 2, 4, 8])
def test_activations_of_a_layer_as_korthikanti(t: int) -> None:
    """arXiv:2205.05198: equation 2, table 2. Means and deviations of the two norms (8 bytes a row),
    which it neglects, come on top.
    """
    s = GPT.sequence
    b = 2
    h = GPT.hidden
    a = GPT.heads
    sbh = s * b * h
    rows = s * b
    scores = 5 * a * s / h
    assert _layer_bytes(t, sequence=False) == pytest.approx(
        sbh * (10 + 24 / t + scores / t) + 16 * rows
    )
    assert _layer_bytes(t, sequence=True) == pytest.approx((sbh * (34 + scores) + 16 * rows) / t)
    assert _layer_bytes(t, sequence=True, recompute=".core") == pytest.approx(
        (34 * sbh + 16 * rows) / t
    )
    assert _layer_bytes(t, sequence=False, recompute="") == pytest.approx(2 * sbh)


@pytest.mark.parametrize(
    ("devices", "stage", "billions"),
    [
        (1, 1, 120),
        (4, 1, 52.5),
        (4, 2, 41.25),
        (16, 1, 35.6),
        (16, 2, 21.6),
        (64, 1, 31.4),
        (64, 2, 16.6),
        (64, 3, 1.88),
        (1024, 3, 0.12),
    ],
)
def test_states_as_in_the_zero_paper(devices: int, stage: int, billions: float) -> None:
    """arXiv:1910.02054, table 1, the model of 7.5B parameters in mixed precision: GB (1e9) by
    device.
    """
    builder = GraphBuilder("float16")
    weight = builder.parameter("w", 7_500_000_000 // 1024, 1024)
    graph = builder.finish(
        "one",
        [builder.one("aten.mul.Tensor", builder.tensors[weight].shape, self=weight, other=2.0)],
    )
    analysis = analyse(graph, train=True)
    mesh = Mesh(
        axes=(Axis(name="data", size=devices, level=load_cluster("dgx-a100").levels[0].name),)
    )
    program = _stored(analysis, mesh, split=stage == 3)
    states = states_of(
        program,
        analysis,
        Training(
            optimizer="adamw",
            precision=PRECISIONS["mixed"],
            optimizer_shards=1 if stage == 3 else devices,
            gradient_shards=devices if stage == 2 else 1,
        ),
    )
    total = states.parameters + states.gradients + states.master + states.optimizer
    assert total / 1e9 == pytest.approx(billions, rel=0.04 if billions < 1 else 0.005)


def _stored(analysis: Analysis, mesh: Mesh, *, split: bool) -> Program:
    from autopar.sharding.program import Assignment

    storage = {"w": (S(0),) if split and mesh.shape[0] > 1 else (R,)}
    assignment = Assignment(mesh=mesh, decisions={}, storage=storage, outputs={}, chains={})
    return Program(graph=analysis.graph, assignment=assignment, steps=())


def test_megatron_stores_18_bytes_a_parameter() -> None:
    assert (
        sum(PRECISIONS["mixed-main"].sizes("bfloat16")[:2])
        + 2 * PRECISIONS["mixed-main"].sizes("bfloat16")[2]
        + 2
        == 18
    )


# --- programs ---


def test_micro_batches_in_flight_add_what_one_saves() -> None:
    program, analysis = _laid_out()
    two, five = (autograd_memory(program, analysis, ADAMW, in_flight=n) for n in (2.0, 5.0))
    assert five.total - two.total == pytest.approx(3 * two.saved)
    assert two.gradients == sum(t.bytes for t in program.graph.parameters), (
        "gradients of earlier micro-batches are there all the time"
    )


def test_the_tables_add_up_to_what_is_saved() -> None:
    """The search's sums by operator against the walk of the program that it finds, where a segment
    also holds what no operator keeps.
    """
    _, analysis = _laid_out()
    cluster = load_cluster("dgx-a100").sized(4)
    mesh = Mesh(axes=(Axis(name="a", size=4, level=cluster.levels[0].name),))
    best = best_on_mesh(
        analysis, mesh, Request(cluster=cluster, train=True, optimizer="adamw", memory=math.inf)
    )
    program = best.program
    tables = build_tables(analysis, MeshPrices(cluster=cluster, mesh=mesh), optimizer="adamw")
    told = tables.graph.memory_of(best.solution.choices)
    memory = predicted_memory(program, analysis, optimizer="adamw")
    stored = states_of(program, analysis, ADAMW)
    inputs = sum(
        local_bytes(layout, program.graph.tensors[name].bytes, mesh.shape)
        for name, layout in inputs_read(program)
    )
    exact = stored.parameters - inputs + stored.gradients + stored.optimizer + memory.saved
    assert told == pytest.approx(exact, rel=0.1)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from([".core", ".mlp", ""]), st.sampled_from([1, 2, 4]), st.booleans())
def test_recompute_keeps_less_and_never_forgets_what_is_alive(
    word: str, tensor: int, sequence: bool
) -> None:
    program, analysis = _laid_out(tensor, sequence=sequence, layers=2)
    facts = facts_of(analysis)
    plain = live_bytes(program, facts, Autograd())
    again = live_bytes(program, facts, Autograd(recompute=_segments(analysis, 2, word)))
    assert again.saved < plain.saved
    assert max(map(sum, zip(again.activations, again.passing, strict=True))) <= max(
        map(sum, zip(plain.activations, plain.passing, strict=True))
    )
    for live in (plain, again):
        assert min(min(live.activations), min(live.gradients), min(live.passing)) > -1e-3, (
            "nothing is freed twice"
        )
        assert sum(live.saved_of.values()) == pytest.approx(live.saved)
        assert live.activations[-1] == live.passing[-1] == pytest.approx(0.0, abs=1e-3), (
            "nothing is left at the end"
        )


def test_inference_keeps_nothing() -> None:
    analysis = analyse(_laid_out()[1].graph, train=False)
    cluster = load_cluster("dgx-a100").sized(1)
    mesh = Mesh(axes=(Axis(name="a", size=1, level=cluster.levels[0].name),))
    best = best_on_mesh(
        analysis, mesh, Request(cluster=cluster, train=False, optimizer="none", memory=math.inf)
    )
    memory = predicted_memory(best.program, analysis, optimizer="none")
    assert (memory.gradients, memory.optimizer, memory.activations, memory.saved) == (0, 0, 0, 0)
    assert memory.parameters > 0
    assert memory.transient > 0
    assert not saved_values(analysis).shares


def test_bytes_of_every_dtype_are_known_to_the_precisions() -> None:
    for dtype, size in DTYPE_BYTES.items():
        assert Precision().sizes(dtype) == (size, 0.0, size)
