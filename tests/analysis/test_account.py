"""Every collective of the program belongs to one operator or to one unit of parameters, and words
say what is split.
"""

from __future__ import annotations

from collections import Counter

import pytest
from onnx import TensorProto, helper
from report_models import MEGATRON, account, perceptrons, planned

from autopar.analysis.program.equal_layers import groups_of
from autopar.analysis.program.strategy_words import idle_axes, phrase
from autopar.api import Planned, plan_loaded
from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.report.explain.operators import find_operators
from autopar.schemes import scheme_of
from autopar.sharding.program import Collective

SCHEMES = ("data", "zero3", "tensor", "megatron", "megatron-sp")


@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
@pytest.mark.parametrize("scheme", [None, *SCHEMES])
def test_no_collective_is_lost(scheme: str | None, mesh: tuple[int, ...], mode: str) -> None:
    _check(planned(3, scheme=scheme, mesh=mesh, mode=mode))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_no_collective_of_a_schedule_is_lost(zero: int, recompute: str) -> None:
    _check(planned(4, scheme="data", zero=zero, micro_batches=4, recompute=recompute, stages=1))


def _check(planned_model: Planned) -> None:
    whole = account(planned_model)
    issued = Counter(
        (c.phase, c.kind, c.axes, c.nbytes, c.tensor)
        for c in planned_model.plan.execution(whole.analysis).micro.collectives()
    )
    told: Counter[tuple[str, str, int, int, str]] = Counter()
    for operator in whole.operators:
        told.update(_key(collective) for collective, _ in operator.collectives)
    for unit in whole.units:
        told.update(_key(collective) for collective, _ in unit.collectives)
    assert told == issued
    assert whole.communication == pytest.approx(planned_model.plan.predicted.communication)
    groups = groups_of(whole)
    assert sorted(name for group in groups for name in group.operators) == sorted(
        op.operator.name for op in whole.operators
    )
    assert sum(group.collectives.total() for group in groups) == sum(
        len(op.collectives) for op in whole.operators
    )


def _key(collective: Collective) -> tuple[str, str, int, int, str]:
    return collective.phase, collective.kind, collective.axes, collective.nbytes, collective.tensor


def test_megatron_is_named() -> None:
    whole = account(planned(pins=MEGATRON))
    words = {op.operator.name: phrase(op, whole) for op in whole.operators}
    assert words["/layers.0/up/MatMul"] == "column-parallel over gpu"
    assert words["/layers.0/down/MatMul"] == "row-parallel over gpu (all-reduce)"
    assert scheme_of(whole.plan, whole.analysis).axes == {"gpu": "megatron"}
    assert idle_axes(whole) == []


def test_zero3_is_named() -> None:
    whole = account(planned(scheme="zero3", pins=("*MatMul=gpu:m",)))
    assert phrase(whole.operators[0], whole) == "batch over gpu; ZeRO-3 storage over gpu"
    assert scheme_of(whole.plan, whole.analysis).name == "zero3"


def test_idle_devices_are_told() -> None:
    whole = account(planned(pins=("*=gpu:R",), mode="infer"))
    assert scheme_of(whole.plan, whole.analysis).name == "replicated"
    assert idle_axes(whole) == ["gpu"]


def test_pins_that_contradict_are_told() -> None:
    with pytest.raises(UsageError, match="leave no strategy"):
        planned(pins=("*/up/*=gpu:R",), scheme="tensor")


def test_layers_that_differ_are_not_folded() -> None:
    data = "gpu:m"
    tensor = (
        "/layers.1/up/MatMul=gpu:n",
        "/layers.1/act/Relu=gpu:d1",
        "/layers.1/down/MatMul=gpu:k",
    )
    pins = (
        *tensor,
        *(f"/layers.{i}/{name}/MatMul={data}" for i in (0, 2, 3) for name in ("up", "down")),
    )
    names = [group.name for group in groups_of(account(planned(4, pins=pins)))]
    assert {"layers.{0,2,3}/up", "layers.1/up", "layers.{0,2,3}/down", "layers.1/down"} <= set(
        names
    )


def test_heads_and_sequence_are_recognised() -> None:
    """A view of the features as heads, on (batch, sequence, features)."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["q"], name="/q/MatMul"),
        helper.make_node("Reshape", ["q", "shape"], ["split"], name="/split/Reshape"),
        helper.make_node("Transpose", ["split"], ["y"], name="/turn/Transpose", perm=[0, 2, 1, 3]),
    ]
    weights = [
        helper.make_tensor("w", TensorProto.FLOAT, (16, 16), [0.0] * 256),
        helper.make_tensor("shape", TensorProto.INT64, (4,), [8, 4, 4, 4]),
    ]
    infos = [
        helper.make_tensor_value_info(n, TensorProto.FLOAT, s)
        for n, s in (("x", [8, 4, 16]), ("y", [8, 4, 4, 4]))
    ]
    model = helper.make_model(
        helper.make_graph(nodes, "heads", infos[:1], infos[1:], weights),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    loaded = load_model(model, ModelOptions(train=False))
    plan = plan_loaded(
        loaded,
        cluster="dgx-h100",
        devices=2,
        mesh=(2,),
        mode="infer",
        pins=["/turn/Transpose=gpu:d2", "/split/Reshape=gpu:c"],
    )
    whole = account(plan)
    assert [phrase(op, whole) for op in whole.operators][1:] == ["heads over gpu", "heads over gpu"]
    plan = plan_loaded(
        loaded,
        cluster="dgx-h100",
        devices=2,
        mesh=(2,),
        mode="infer",
        pins=["/turn/Transpose=gpu:d1", "/q/MatMul=gpu:m"],
    )
    whole = account(plan)
    assert (
        phrase(whole.operators[0], whole)
        == phrase(whole.operators[2], whole)
        == "sequence over gpu"
    )


def test_operators_are_found_by_name_module_and_pattern() -> None:
    names = [node.name for node in perceptrons(3).graph.node]
    assert find_operators(names, "layers.0/up/MatMul") == ["/layers.0/up/MatMul"]
    assert find_operators(names, "layers.1/up") == ["/layers.1/up/MatMul"]
    assert len(find_operators(names, "*/down/*")) == 3
    with pytest.raises(UsageError, match=r"nearest are layers.0/up/MatMul"):
        find_operators(names, "layer.0/up/Matmul")
