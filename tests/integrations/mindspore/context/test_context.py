"""Each key of the context changes its part of the plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.plan import Plan
from autopar.sharding.analysis import analyse
from tests.integrations.mindspore.context.nets import (
    BATCH,
    RANKS,
    Many,
    Two,
    build,
    few,
    inputs,
    small_plan,
)


def _reduced(plan: Plan) -> list[tuple[str, ...]]:
    """The parameters of every reduction of gradients, in their order."""
    model = load_model(build(Many), ModelOptions(train=True), (inputs(),))
    (chunk,) = plan.execution(analyse(model.graph, train=True)).chunks
    return [bucket.parameters for bucket in chunk.whole.buckets]


def test_stand_alone_is_one_device() -> None:
    assert small_plan(build(few), parallel_mode="stand_alone").devices == 1
    autopar.reset_auto_parallel_context()
    assert (
        autopar.plan(build(few), (inputs(),), cluster="local-cpu", devices=RANKS).devices <= RANKS
    )


def test_stand_alone_is_one_device_however_many_would_be_faster() -> None:
    with torch.device("meta"):
        net = nn.Linear(8192, 8192, bias=False)
        x = torch.empty(2**16, 8192)
    autopar.set_auto_parallel_context(parallel_mode="stand_alone")
    assert autopar.plan(net, (x,), cluster="dgx-h100", optimizer="sgd").devices == 1


@pytest.mark.parametrize(("reduction", "weight"), [("mean", 2.0), ("sum", 1.0)])
def test_a_loss_function_says_whether_it_is_a_mean(reduction: str, weight: float) -> None:
    """Each rank's own loss counts in data parallelism: of means the sum is as many times as large
    as there are ranks.
    """
    autopar.set_auto_parallel_context(device_num=RANKS, parallel_mode="data_parallel")

    def loss(output: Tensor, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(output, x, reduction=reduction)

    plan = autopar.plan(
        build(lambda: nn.Linear(12, 12)),
        (inputs(),),
        cluster="local-cpu",
        optimizer="sgd",
        loss=loss,
    )
    assert plan.schedule.reductions.weight == weight


def test_data_parallel_keeps_all_parameters_on_every_device() -> None:
    plan = small_plan(build(few), parallel_mode="data_parallel")
    assert plan.devices == RANKS and {p.storage for p in plan.parameters.values()} == {"R"}
    assert all(op.strategy != ("R",) for name, op in plan.operators.items() if "linear" in name)


def test_a_parallel_optimizer_stores_parts() -> None:
    plan = small_plan(build(few), parallel_mode="data_parallel", enable_parallel_optimizer=True)
    assert {p.storage for p in plan.parameters.values()} == {"S0"}


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_a_parallel_optimizer_of_groups_of_devices(mode: str) -> None:
    autopar.set_auto_parallel_context(
        device_num=4,
        parallel_mode=mode,
        enable_parallel_optimizer=True,
        optimizer_weight_shard_size=2,
    )
    plan = autopar.plan(build(few), (inputs(),), cluster="local-cpu", optimizer="sgd")
    assert plan.mesh_.shape == (2, 2)
    assert all(p.storage.count("S") == 1 for p in plan.parameters.values())


def test_semi_auto_splits_the_batch_where_nothing_is_said() -> None:
    plan = small_plan(build(few), parallel_mode="semi_auto_parallel")
    assert {p.storage for p in plan.parameters.values()} == {"R"}
    divided = small_plan(
        build(few), parallel_mode="semi_auto_parallel", enable_parallel_optimizer=True
    )
    assert all("S" in p.storage for p in divided.parameters.values())


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_cuts_are_respected_by_both_searches(mode: str, search: str) -> None:
    keys = {"auto_parallel_search_mode": search} if mode == "auto_parallel" else {}
    autopar.set_auto_parallel_context(parallel_mode=mode, device_num=4, **keys)
    plan = autopar.plan(build(Two), (inputs(),), cluster="local-cpu", mode="infer")
    assert set(plan.operators["first/matmul"].strategy) == {"m"} and set(
        plan.operators["second/matmul"].strategy
    ) == {"n"}
    assert plan.provenance.method == (search if keys else "dynamic_programming")
    assert {name: set(p.storage.split()) for name, p in plan.parameters.items()} == {
        "w": {"R"},
        "v": {"S1"},
    }


def test_the_two_products_have_one_all_gather_between_them() -> None:
    autopar.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4)
    plan = autopar.plan(build(Two), (inputs(),), cluster="local-cpu", mode="infer")
    assert [(c.kind, c.nbytes) for c in plan.collectives] == [("all_gather", BATCH * 8 * 8)]


def test_devices_that_no_cut_needs_hold_copies() -> None:
    module = build(few)
    autopar.shard(module.get_submodule("layers.1"), ((2, 1), (1, 1)))
    autopar.set_auto_parallel_context(parallel_mode="auto_parallel", device_num=4)
    plan = autopar.plan(module, (inputs(),), cluster="local-cpu", optimizer="sgd")
    cut = plan.operators["layers.1/linear"].strategy
    assert plan.devices == 4 and sorted(cut) in (
        ["B", "m"],
        ["R", "m"],
        ["R", "d0"],
        ["B", "d0"],
    ), cut


@pytest.mark.parametrize("key", ["strategy_ckpt_load_file", "strategy_ckpt_save_file"])
def test_a_strategy_checkpoint_is_a_file_and_no_folder(key: str) -> None:
    with pytest.raises(AutoparError, match=rf"{key} is '\./', a folder"):
        small_plan(build(few), parallel_mode="auto_parallel", **{key: "./"})


def test_propagation_goes_on_from_what_is_cut() -> None:
    autopar.set_auto_parallel_context(
        parallel_mode="auto_parallel",
        device_num=4,
        auto_parallel_search_mode="sharding_propagation",
    )
    plan = autopar.plan(build(Two), (inputs(),), cluster="local-cpu", mode="infer")
    assert set(plan.operators["first/matmul"].strategy) == {"m"}
    with pytest.raises(UsageError, match="goes on from operators that are cut"):
        autopar.plan(build(few), (inputs(),), cluster="local-cpu")


@pytest.mark.parametrize(
    ("mode", "factors"), [("semi_auto_parallel", {"d0"}), ("auto_parallel", {"n", "k"})]
)
def test_auto_parallel_finds_what_data_parallelism_is_not(mode: str, factors: set[str]) -> None:
    """Wide layers of few rows: to sum their gradients takes longer than to split them."""
    with torch.device("meta"):
        net = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(2)))
        x = torch.empty(64, 16384)
    autopar.set_auto_parallel_context(parallel_mode=mode, device_num=8, full_batch=True)
    plan = autopar.plan(net, (x,), cluster="dgx-a100-80g", optimizer="sgd")
    assert (
        set().union(*(op.strategy for op in plan.operators.values() if "linear" in op.kind))
        == factors
    )


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_are_those_of_the_context(stages: int) -> None:
    autopar.set_auto_parallel_context(
        device_num=4, parallel_mode="auto_parallel", pipeline_stages=stages
    )
    plan = autopar.plan(build(lambda: Many(4)), (inputs(),), cluster="local-cpu", optimizer="sgd")
    assert plan.devices == 4
    assert max(len(plan.stages), 1) == stages


def test_fusion_cuts_the_reductions_of_fifty_parameters_in_three() -> None:
    plan = small_plan(build(Many), parallel_mode="data_parallel", all_reduce_fusion_config=[20, 35])
    backwards = list(reversed(list(plan.parameters)))
    assert [sorted(one) for one in _reduced(plan)] == [
        sorted(backwards[:20]),
        sorted(backwards[20:35]),
        sorted(backwards[35:]),
    ]
    priced = [c for c in plan.collectives if c.kind == "all_reduce" and c.nbytes > 8]
    assert len(priced) == 3
    autopar.set_auto_parallel_context(all_reduce_fusion_config=[])
    assert len(_reduced(small_plan(build(Many), parallel_mode="data_parallel"))) == 1


def test_fusion_numbers_of_modules_are_sets() -> None:
    module = build(few)
    for layer, number in ((0, 1), (2, 1), (1, 0)):
        autopar.add_prim_attr(module.get_submodule(f"layers.{layer}"), "fusion", number)
    plan = small_plan(module, parallel_mode="data_parallel")
    assert plan.schedule.reductions.fused == (
        ("layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"),
        ("layers.1.weight",),
        ("layers.1.bias",),
    )
    model = load_model(module, ModelOptions(train=True), (inputs(),))
    (chunk,) = plan.execution(analyse(model.graph, train=True)).chunks
    assert sorted(sorted(b.parameters) for b in chunk.whole.buckets) == sorted(
        map(sorted, plan.schedule.reductions.fused)
    )


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_fusion_numbers_merge_gathers_too(mode: str) -> None:
    """Gathers of weights that are stored in parts: collectives of one kind and one number are one,
    those of number 0 alone.
    """
    module = build(lambda: Many(4))
    for layer, number in ((0, 1), (2, 1), (1, 0), (3, 2)):
        autopar.add_prim_attr(module.get_submodule(f"layers.{layer}"), "fusion", number)
    plan = small_plan(module, parallel_mode=mode, enable_parallel_optimizer=True)
    weight = 8 * 12 * 12
    bias = 8 * 12
    sizes = [2 * (weight + bias), weight, bias, weight + bias]
    actual = [(c.kind, c.nbytes) for c in plan.collectives if c.nbytes > 8]
    assert actual == [("all_gather", size) for size in sizes] + [
        ("reduce_scatter", size) for size in (sizes[3], bias, weight, sizes[0])
    ]
    assert all(
        op.strategy == ("d0",) for op in plan.operators.values()
    )  # no micro-batch is too small to be split


@pytest.mark.parametrize(("synced", "reduced"), [(True, "float32"), (False, None)])
def test_sixteen_bit_gradients_travel_in_float32(synced: bool, reduced: str | None) -> None:
    autopar.set_auto_parallel_context(
        device_num=RANKS, parallel_mode="data_parallel", gradient_fp32_sync=synced
    )
    plan = autopar.plan(
        build(few).to(torch.bfloat16),
        (inputs().to(torch.bfloat16),),
        cluster="local-cpu",
        optimizer="sgd",
    )
    assert plan.schedule.reduce == reduced


@pytest.mark.parametrize(("synced", "nbytes"), [(True, 4), (False, 2)])
def test_gradients_of_a_sixteen_bit_computation_travel_in_the_type_of_the_key(
    synced: bool, nbytes: int
) -> None:
    """Its parameters are stored in float32, in which their gradients travel unless the key says
    otherwise.
    """
    autopar.set_auto_parallel_context(
        device_num=RANKS, parallel_mode="data_parallel", gradient_fp32_sync=synced
    )
    plan = autopar.plan(
        build(few).float(),
        (inputs().float(),),
        cluster="local-cpu",
        optimizer="sgd",
        dtype="bfloat16",
    )
    assert sum(
        c.nbytes for c in plan.collectives if c.kind == "all_reduce" and c.nbytes > 8
    ) == nbytes * 3 * (12 * 12 + 12)


@pytest.mark.parametrize(
    ("keys", "given", "why"),
    [
        ({"parallel_mode": "hybrid_parallel"}, {}, r"mark them with autopar\.layerwise_parallel"),
        ({"parallel_mode": "data_parallel"}, {"devices": 4}, "another than the 2"),
        ({"parallel_mode": "data_parallel"}, {"scheme": "zero3"}, "another than the 'data'"),
        ({"full_batch": True}, {}, "says nothing in the mode stand_alone"),
    ],
)
def test_contradictions_are_refused(keys: dict[str, Any], given: dict[str, Any], why: str) -> None:
    autopar.set_auto_parallel_context(device_num=RANKS, **keys)
    with pytest.raises(UsageError, match=why):
        autopar.plan(build(few), (inputs(),), cluster="local-cpu", **given)


def test_marks_are_for_their_modes() -> None:
    with pytest.raises(UsageError, match="semi_auto_parallel and auto_parallel"):
        small_plan(build(Two), parallel_mode="data_parallel")
    module = build(few)
    autopar.layerwise_parallel(next(module.parameters()))
    with pytest.raises(UsageError, match="for the mode hybrid_parallel"):
        small_plan(module, parallel_mode="data_parallel")


@pytest.mark.parametrize(
    ("cuts", "why"),
    [
        (((3, 1), (1, 1)), "which 3 does not divide"),
        (((8, 1), (1, 1)), "8 parts, which do not divide the 4 devices of a stage; 4 would"),
        (((1, 3), (3, 1)), "3 parts, which do not divide the 4 devices of a stage; 2 and 4 would"),
        (((1, 2), (1, 4)), "cut it alike"),
        (((1, 1, 1), (1, 1)), "no operator takes inputs of 3, 2 dims; its operators: first/matmul"),
    ],
)
def test_cuts_are_checked_against_shapes_and_devices(cuts: Any, why: str) -> None:
    module = build(Two)
    autopar.shard(module.get_submodule("first"), cuts)
    autopar.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4)
    with pytest.raises(UsageError, match=why):
        autopar.plan(module, (inputs(),), cluster="local-cpu", mode="infer")


CUT = autopar.shard(torch.matmul, ((1, 1), (1, 4)))


class _InADict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))
        self.products = {"first": CUT}

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = self.products["first"](x, self.weight)
        return product


class _Global(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        product: Tensor = CUT(x, self.weight)
        return product


@pytest.mark.parametrize(
    ("made", "name"), [(_InADict, "shard of products"), (_Global, "shard of _Global.forward: CUT")]
)
def test_a_cut_that_no_attribute_holds_is_refused(made: type[nn.Module], name: str) -> None:
    """No path of the model leads to such an operator, so that nothing would be cut."""
    autopar.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4)
    with pytest.raises(UsageError, match=f"{name}: the cut operator is no attribute"):
        autopar.plan(made(), (torch.zeros(8, 8),), cluster="local-cpu", mode="infer")


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: autopar.shard(torch.matmul, (4, 1)), "no tuple of whole numbers"),
        (lambda: autopar.shard(torch.matmul, ((0, 1),)), "from 1 on"),
        (lambda: autopar.shard(torch.matmul, ()), "no tuple of tuples"),
        (lambda: autopar.shard("matmul", ((1, 1),)), "a module or a function"),
        (
            lambda: autopar.add_prim_attr(nn.Linear(1, 1), "fuse", 1),
            "valid are cross_batch, fusion",
        ),
        (lambda: autopar.add_prim_attr(nn.Linear(1, 1), "fusion", -1), "from 0 on"),
        (lambda: autopar.add_prim_attr(nn.Linear(1, 1), "cross_batch", 1), "True or False"),
        (lambda: autopar.add_prim_attr(torch.matmul, "fusion", 1), "belong to modules"),
        (lambda: autopar.layerwise_parallel(nn.Linear(1, 1)), "marks parameters"),
    ],
)
def test_wrong_marks_are_refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        call()
