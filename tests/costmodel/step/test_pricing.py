"""Prices of operators, storage and updates, and the estimate of a program, from figures small
enough to work out by hand.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

import autopar
from autopar.api import plan_loaded
from autopar.costmodel import bind_axes, load_cluster
from autopar.costmodel.device.elementwise import memory_seconds
from autopar.costmodel.device.kernel_seconds import product_seconds
from autopar.costmodel.device.operator_seconds import operator_seconds
from autopar.costmodel.device.products import Product
from autopar.costmodel.frameworks import framework_named
from autopar.costmodel.step import estimate as estimate_module
from autopar.costmodel.step.estimate import estimate, step_seconds
from autopar.costmodel.step.mesh_prices import (
    SHARERS,
    MeshPrices,
    optimizer_named,
    storage_bytes,
    update_seconds,
)
from autopar.costmodel.step.shared_cores import INTERRUPTION
from autopar.errors import UsageError
from autopar.frontends.load import LoadedModel, ModelOptions, load_model
from autopar.ir import Role, Tensor
from autopar.options.plan_options import choose_cluster
from autopar.order.scheduled import scheduled
from autopar.planning.space.candidates import name_axes
from autopar.sharding.analysis import analyse
from autopar.sharding.candidates import strategies_of
from autopar.sharding.program import Collective, Compute, Decision

ROWS = 4096
IN = 2048
OUT = 8192


def linear(*, train: bool = True) -> LoadedModel:
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(IN, OUT, bias=False))
    return load_model(module, ModelOptions(train=train), (torch.empty(ROWS, IN, device="meta"),))


def weight(*shape: int, trainable: bool = True) -> Tensor:
    return Tensor(name="w", shape=shape, dtype="float32", role=Role.PARAMETER, trainable=trainable)


@pytest.mark.parametrize(
    ("option", "m", "n", "k", "nbytes"),
    [
        ("R", ROWS, OUT, IN, 4 * (ROWS * IN + IN * OUT + ROWS * OUT)),
        ("d0", ROWS / 4, OUT, IN, ROWS * IN + 4 * IN * OUT + ROWS * OUT),
        ("n", ROWS, OUT / 4, IN, 4 * ROWS * IN + IN * OUT + ROWS * OUT),
        ("k", ROWS, OUT, IN / 4, ROWS * IN + IN * OUT + 4 * ROWS * OUT),
    ],
)
def test_a_linear_layer_is_priced_on_its_local_shapes(
    option: str, m: float, n: float, k: float, nbytes: float
) -> None:
    """Backward: one product, that of the weight's gradient [k, m] x [m, n] (the input carries
    none), on the same tensors.
    """
    analysis = analyse(linear().graph, train=True)
    offer = analysis.offers["0/linear"]
    cluster = choose_cluster("dgx-h100", 4)[0]
    strategies = strategies_of(offer.rule, offer.options, (4,))
    row = next(i for i in range(len(strategies.choices)) if strategies.names(i) == (option,))
    forward, backward = operator_seconds(offer.call, strategies, (4,), cluster, analysis.gradients)

    def expected(m: float, n: float, k: float) -> float:
        product = Product(batch=np.ones(1), m=np.array([m]), n=np.array([n]), k=np.array([k]))
        return float(
            product_seconds(
                product, "float32", cluster.device, itemsize=4, nbytes=np.array([nbytes])
            )[0]
        )

    assert forward[row] == pytest.approx(expected(m, n, k), rel=1e-12)
    assert backward[row] == pytest.approx(expected(k, n, m), rel=1e-12)


def test_values_are_cast_before_a_narrow_product_and_parameters_are_not() -> None:
    """The input forward and the result's gradient backward, on a device whose narrow products were
    measured.
    """
    analysis = analyse(linear().graph, train=True)
    offer = analysis.offers["0/linear"]
    cluster = load_cluster("dgx-h100")
    strategies = strategies_of(offer.rule, offer.options, ())
    operator = replace(offer.call.operator, attributes={"compute": "float8_e4m3fn"})
    call = replace(offer.call, operator=operator)
    forward, backward = operator_seconds(call, strategies, (), cluster, analysis.gradients)

    def bare(m: float, n: float, k: float) -> float:
        product = Product(batch=np.ones(1), m=np.array([m]), n=np.array([n]), k=np.array([k]))
        moved = product.traffic(1, 4)
        return float(
            product_seconds(product, "float8_e4m3fn", cluster.device, itemsize=1, nbytes=moved)[0]
        )

    def cast(elements: int) -> float:
        return float(memory_seconds(np.array([2.5 * 4 * elements]), cluster.device)[0])

    assert forward[0] == pytest.approx(bare(ROWS, OUT, IN) + cast(ROWS * IN), rel=1e-9)
    assert backward[0] == pytest.approx(bare(IN, OUT, ROWS) + cast(ROWS * OUT), rel=1e-9)


def test_a_convolution_counts_its_output_rows() -> None:
    """With one image the rows of the product are the places of the output: 56 x 56 x 64 against a
    64 x (64 x 9) filter.
    """
    module = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    model = load_model(module, ModelOptions(train=True), (torch.empty(1, 64, 56, 56),))
    analysis = analyse(model.graph, train=True)
    op = next(op for op in analysis.warm if "conv" in op.kind)
    offer = analysis.offers[op.name]
    device = load_cluster("dgx-h100").device
    strategies = strategies_of(offer.rule, offer.options, ())
    forward, _ = operator_seconds(
        offer.call, strategies, (), load_cluster("dgx-h100"), analysis.gradients
    )
    product = Product(
        batch=np.ones(1), m=np.array([56.0 * 56]), n=np.array([64.0]), k=np.array([64.0 * 9])
    )
    nbytes = np.array([4.0 * (2 * 64 * 56 * 56 + 64 * 64 * 9)])
    assert forward[0] == pytest.approx(
        float(product_seconds(product, "float32", device, itemsize=4, nbytes=nbytes)[0]), rel=1e-9
    )


@pytest.mark.parametrize(
    ("optimizer", "copies", "traffic"), [("adamw", 4, 21), ("sgd", 2, 3), ("none", 2, 0)]
)
def test_storage_and_update_of_a_parameter(optimizer: str, copies: int, traffic: int) -> None:
    cluster = choose_cluster("dgx-h100", 4)[0]
    shards = np.array([1, 4])
    tensor = weight(1024, 1024)
    assert storage_bytes(tensor, shards, optimizer, train=True).tolist() == [
        copies * tensor.bytes,
        copies * tensor.bytes / 4,
    ]
    assert storage_bytes(tensor, shards, optimizer, train=False).tolist() == [
        tensor.bytes,
        tensor.bytes / 4,
    ]
    assert storage_bytes(weight(8, trainable=False), shards, optimizer, train=True).tolist() == [
        32,
        8,
    ]
    rate = cluster.device.memory_bandwidth * cluster.device.memory_fraction
    wanted = [
        traffic * tensor.bytes / s / rate + cluster.device.launch if traffic else 0.0
        for s in (1, 4)
    ]
    assert update_seconds(tensor, shards, optimizer, cluster).tolist() == pytest.approx(
        wanted, rel=1e-12
    )
    assert update_seconds(weight(8, trainable=False), shards, optimizer, cluster).tolist() == [0, 0]
    cached = replace(
        cluster, device=replace(cluster.device, update_fraction=2 * cluster.device.memory_fraction)
    )
    host = replace(cluster.device, host={"update": 7 * cluster.device.launch})
    longer = [seconds + 6 * host.launch if traffic else 0.0 for seconds in wanted]
    assert update_seconds(
        tensor, shards, optimizer, replace(cluster, device=host)
    ).tolist() == pytest.approx(longer, rel=1e-12)
    halved = [seconds / 2 + cluster.device.launch / 2 if traffic else 0.0 for seconds in wanted]
    assert update_seconds(tensor, shards, optimizer, cached).tolist() == pytest.approx(
        halved, rel=1e-12
    )


def test_an_unknown_optimizer_is_an_error_that_lists_the_valid_ones() -> None:
    with pytest.raises(
        UsageError,
        match=r"valid are adamw, sgd, momentum, lamb, muon, none\. Perhaps you meant 'adamw'",
    ):
        optimizer_named("adam")


@pytest.mark.parametrize("train", [True, False])
def test_a_step_is_the_sum_of_its_parts(train: bool) -> None:
    model = linear(train=train)
    cluster = choose_cluster("dgx-h100", 4)[0]
    plan = plan_loaded(
        model,
        cluster="dgx-h100",
        devices=4,
        mesh=(4,),
        mode="train" if train else "infer",
        pins=["0/linear=gpu:d0"],
    ).plan
    analysis = analyse(model.graph, train=train)
    prices = MeshPrices(cluster=cluster, mesh=plan.mesh_)
    program = plan.program(analysis)
    priced = estimate(program, analysis, prices, optimizer=plan.model.optimizer)
    issued = [prices.seconds(c.kind, c.axes, c.nbytes) for c in scheduled(program).collectives()]
    assert priced.communication == math.fsum(issued) == plan.predicted.communication
    assert (
        priced.step
        == priced.forward
        + priced.backward
        + priced.update
        + priced.communication
        - priced.overlapped
        == plan.predicted.step
    )
    assert (priced.backward > 0, priced.update > 0, priced.memory.optimizer > 0) == (train,) * 3
    assert priced.memory.total == plan.predicted.memory == sum(plan.predicted.memory_parts.values())
    stored = 4 * IN * OUT / (4 if plan.parameters["0.weight"].storage != "R" else 1)
    rows = 4 * ROWS * IN / 4
    gathered = 0 if plan.parameters["0.weight"].storage == "R" or not train else 4 * IN * OUT
    assert priced.memory.parameters == stored + rows + gathered, (
        "the weight as stored and as used, the rows that are read"
    )
    assert priced.memory.optimizer == (2 * stored if train else 0)


def _prices(preset: str, sizes: tuple[int, ...], parameters: float) -> MeshPrices:
    cluster = load_cluster(preset).sized(math.prod(sizes))
    levels = bind_axes(cluster, sizes)
    assert levels is not None
    return MeshPrices.of(cluster, name_axes(cluster, sizes, levels), parameters)


@pytest.mark.parametrize(
    ("preset", "sizes", "parameters", "mib"),
    [
        ("dgx-h100", (8,), 1e6, 4),
        ("dgx-h100", (8,), 5e8, 64),
        ("dgx-h100", (8,), 1.6e10, 64),
        ("dgx-h100", (2, 8), 1.6e10, 64),
        ("dgx-h100", (1024,), 1.4e11, 512),
        ("local-cpu", (4,), 1e3, 1),
        ("local-cpu", (4,), 2e7, 4),
        ("local-cpu", (4,), 5e8, 8),
        ("dgx-h100", (1,), 5e8, 25),
    ],
)
def test_units_grow_with_latency_and_with_the_model(
    preset: str, sizes: tuple[int, ...], parameters: float, mib: int
) -> None:
    prices = _prices(preset, sizes, parameters)
    assert prices.unit_bytes == mib * 2**20


@pytest.mark.parametrize(
    ("preset", "sizes"),
    [("dgx-h100", (8,)), ("dgx-a100", (2, 8)), ("grand-teton", (16, 8)), ("local-cpu", (4,))],
)
def test_the_latency_of_a_unit_is_an_eighth_of_its_transfer(
    preset: str, sizes: tuple[int, ...]
) -> None:
    """On the axis that decides, within the rounding to a power of two; on the others it is less.

    A message that interrupts the ranks' own computation has that in its latency.
    """
    prices = _prices(preset, sizes, 1e13)
    interrupted = INTERRUPTION if prices.cluster.shared_host else 0.0
    shares = []
    for axis in range(len(sizes)):
        alpha, beta = min(
            prices.lines("all_gather", (axis,)),
            key=lambda line: line[0] + line[1] * prices.unit_bytes,
        )
        shares.append((alpha + interrupted) / (beta * prices.unit_bytes))
    assert 1 / 8 / 2**0.5 <= max(shares) <= 2**0.5 / 8


def test_parts_of_a_message_add_up_to_it() -> None:
    """As many parameters as share a unit, of equal size: its latency once by their bytes, and once
    more as shares of what is tiny.
    """
    prices = _prices("dgx-h100", (8,), 1.6e10)
    for kind in ("all_gather", "reduce_scatter", "all_reduce"):
        whole = prices.seconds(kind, (0,), prices.unit_bytes)
        parts = SHARERS * prices.unit_seconds(kind, (0,), prices.unit_bytes // SHARERS)
        alpha = min(
            prices.lines(kind, (0,)), key=lambda line: line[0] + line[1] * prices.unit_bytes
        )[0]
        assert parts == pytest.approx(whole + alpha, rel=1e-6)
        assert SHARERS * prices.unit_share(
            kind, (0,), prices.unit_bytes // SHARERS
        ) == pytest.approx(whole, rel=1e-6)
        assert prices.unit_seconds(kind, (0,), 4096) < 0.05 * prices.seconds(kind, (0,), 4096), (
            "not a latency for each parameter"
        )


def masked_attention(mask: tuple[int, ...] | None) -> onnx.ModelProto:
    """ONNX attention of 8 batches of 4 heads, 512 queries and keys, with a mask of that shape."""
    shape = (8, 4, 512, 64)
    value = helper.make_tensor_value_info
    names = ["moved", "k", "v", *(["mask"] if mask else [])]
    given = [value(name, TensorProto.FLOAT, shape) for name in "qkv"] + (
        [value("mask", TensorProto.BOOL, mask)] if mask else []
    )
    nodes = [
        helper.make_node("Add", ["q", "w"], ["moved"]),
        helper.make_node("Attention", names, ["y"], name="attention"),
    ]
    weight = helper.make_tensor("w", TensorProto.FLOAT, (64,), [1.0] * 64)
    graph = helper.make_graph(
        nodes, "attention", given, [value("y", TensorProto.FLOAT, shape)], [weight]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)])


@pytest.mark.parametrize("mask", [(8, 1, 512, 512), (512, 512)])
def test_the_dims_of_a_mask_are_no_work(mask: tuple[int, ...]) -> None:
    plain, masked = (
        autopar.plan(masked_attention(m), devices=1, cluster="dgx-h100", mode="infer")
        for m in (None, mask)
    )
    assert masked.predicted.forward < 1.5 * plain.predicted.forward


def test_operators_of_one_mesh_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    analysis = analyse(linear().graph, train=True)
    op = analysis.graph.operators[0]
    cluster = load_cluster("dgx-h100").sized(2)
    mesh = name_axes(cluster, (2,), bind_axes(cluster, (2,)) or ())
    offer = analysis.offers[op.name]
    steps = [
        Compute(
            operator=op, decision=Decision(options=(one,), rule=offer.rule, inputs=(), outputs=())
        )
        for one in offer.options
    ]
    alone = [step_seconds(step, analysis, MeshPrices(cluster=cluster, mesh=mesh)) for step in steps]
    shared = MeshPrices(cluster=cluster, mesh=mesh)
    assert [step_seconds(step, analysis, shared) for step in steps] == alone
    assert len(set(alone)) > 1
    monkeypatch.setattr(estimate_module, "operator_parts", None)
    assert [step_seconds(step, analysis, shared) for step in steps] == alone


def test_rows_are_fanned_out_under_messages_of_a_slower_link_alone() -> None:
    work = framework_named("megatron-core")
    node = replace(work, kernels=replace(work.kernels, dispatcher="node"))
    for framework, hidden in ((node, True), (work, False)):
        cluster = choose_cluster("dgx-h100", 16)[0].run_by(framework)
        levels = bind_axes(cluster, (2, 4, 2))
        assert levels is not None
        prices = MeshPrices(cluster=cluster, mesh=name_axes(cluster, (2, 4, 2), levels))
        rows = Collective(phase="forward", kind="all_to_all", axes=(2,), nbytes=2**24, tensor="x")
        # Over the network first, over an axis of the same node first, and by itself.
        seconds = [prices.collective(replace(rows, outermost=first)) for first in (0, 1, 2, -1)]
        assert (seconds[0] == 0.0) == hidden
        assert seconds[1] == seconds[2] == seconds[3] > 0.0
