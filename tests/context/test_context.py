"""What each key of the context changes of the plan, and of the program on ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, PlanError, UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.plan import Plan
from autopar.runtime.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.sharding.analysis import analyse

from .nets import BATCH, BatchNormed, Many, Normed, Two, Waists, build, gradients_of, inputs

RANKS = 2


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    autopar.reset_auto_parallel_context()
    yield
    autopar.reset_auto_parallel_context()


def _plan(module: nn.Module, **keys: Any) -> Plan:
    autopar.set_auto_parallel_context(device_num=RANKS, **keys)
    return autopar.plan(module, (inputs(),), cluster="local-cpu", optimizer="sgd")


def _few() -> nn.Module:
    return Many(3)


def _reduced(plan: Plan) -> list[tuple[str, ...]]:
    """The parameters of every reduction of gradients, in their order."""
    model = load_model(build(Many), ModelOptions(train=True), (inputs(),))
    (chunk,) = plan.execution(analyse(model.graph, train=True)).chunks
    return [bucket.parameters for bucket in chunk.whole.buckets]


# --- the plan ---


def test_stand_alone_is_one_device() -> None:
    assert _plan(build(_few), parallel_mode="stand_alone").devices == 1
    autopar.reset_auto_parallel_context()
    assert autopar.plan(build(_few), (inputs(),), cluster="local-cpu", devices=RANKS).devices <= RANKS


def test_stand_alone_is_one_device_however_many_would_be_faster() -> None:
    with torch.device("meta"):
        net, x = nn.Linear(8192, 8192, bias=False), torch.empty(2**16, 8192)
    autopar.set_auto_parallel_context(parallel_mode="stand_alone")
    assert autopar.plan(net, (x,), cluster="dgx-h100", optimizer="sgd").devices == 1


@pytest.mark.parametrize(("reduction", "weight"), [("mean", 2.0), ("sum", 1.0)])
def test_a_loss_function_says_whether_it_is_a_mean(reduction: str, weight: float) -> None:
    """Each rank's own loss counts in data parallelism: of means the sum is as many times as large as there are ranks."""
    autopar.set_auto_parallel_context(device_num=RANKS, parallel_mode="data_parallel")

    def loss(found: Tensor, x: Tensor) -> Tensor:
        return nn.functional.mse_loss(found, x, reduction=reduction)

    plan = autopar.plan(build(lambda: nn.Linear(12, 12)), (inputs(),), cluster="local-cpu", optimizer="sgd", loss=loss)
    assert plan.schedule.reductions.weight == weight


def test_data_parallel_keeps_all_parameters_on_every_device() -> None:
    plan = _plan(build(_few), parallel_mode="data_parallel")
    assert plan.devices == RANKS and {p.storage for p in plan.parameters.values()} == {"R"}
    assert all(op.strategy != ("R",) for name, op in plan.operators.items() if "linear" in name)


def test_a_parallel_optimizer_stores_parts() -> None:
    plan = _plan(build(_few), parallel_mode="data_parallel", enable_parallel_optimizer=True)
    assert {p.storage for p in plan.parameters.values()} == {"S0"}


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_a_parallel_optimizer_of_groups_of_devices(mode: str) -> None:
    autopar.set_auto_parallel_context(device_num=4, parallel_mode=mode, enable_parallel_optimizer=True, optimizer_weight_shard_size=2)
    plan = autopar.plan(build(_few), (inputs(),), cluster="local-cpu", optimizer="sgd")
    assert plan.mesh_.shape == (2, 2)
    assert all(p.storage.count("S") == 1 for p in plan.parameters.values())


def test_semi_auto_splits_the_batch_where_nothing_is_said() -> None:
    plan = _plan(build(_few), parallel_mode="semi_auto_parallel")
    assert {p.storage for p in plan.parameters.values()} == {"R"}
    divided = _plan(build(_few), parallel_mode="semi_auto_parallel", enable_parallel_optimizer=True)
    assert all("S" in p.storage for p in divided.parameters.values())


@pytest.mark.parametrize("mode", ["semi_auto_parallel", "auto_parallel"])
@pytest.mark.parametrize("search", ["dynamic_programming", "recursive_programming"])
def test_cuts_are_respected_by_both_searches(mode: str, search: str) -> None:
    keys = {"auto_parallel_search_mode": search} if mode == "auto_parallel" else {}
    autopar.set_auto_parallel_context(parallel_mode=mode, device_num=4, **keys)
    plan = autopar.plan(build(Two), (inputs(),), cluster="local-cpu", mode="infer")
    assert set(plan.operators["first/matmul"].strategy) == {"m"} and set(plan.operators["second/matmul"].strategy) == {"n"}
    assert plan.provenance.method == (search if keys else "dynamic_programming")
    assert {name: set(p.storage.split()) for name, p in plan.parameters.items()} == {"w": {"R"}, "v": {"S1"}}


def test_the_two_products_have_one_all_gather_between_them() -> None:
    autopar.set_auto_parallel_context(parallel_mode="semi_auto_parallel", device_num=4)
    plan = autopar.plan(build(Two), (inputs(),), cluster="local-cpu", mode="infer")
    assert [(c.kind, c.nbytes) for c in plan.collectives] == [("all_gather", BATCH * 8 * 8)]


def test_devices_that_no_cut_needs_hold_copies() -> None:
    module = build(_few)
    autopar.shard(module.get_submodule("layers.1"), ((2, 1), (1, 1)))
    autopar.set_auto_parallel_context(parallel_mode="auto_parallel", device_num=4)
    plan = autopar.plan(module, (inputs(),), cluster="local-cpu", optimizer="sgd")
    cut = plan.operators["layers.1/linear"].strategy
    assert plan.devices == 4 and sorted(cut) in (["B", "m"], ["R", "m"], ["R", "d0"], ["B", "d0"]), cut


@pytest.mark.parametrize(("key", "why"), [("strategy_ckpt_load_file", "cannot be read"), ("strategy_ckpt_save_file", r"ends with \.json")])
def test_a_strategy_checkpoint_is_a_file_and_no_folder(key: str, why: str) -> None:
    with pytest.raises(AutoparError, match=why):
        _plan(build(_few), parallel_mode="auto_parallel", **{key: "./"})


def test_propagation_goes_on_from_what_is_cut() -> None:
    autopar.set_auto_parallel_context(parallel_mode="auto_parallel", device_num=4, auto_parallel_search_mode="sharding_propagation")
    plan = autopar.plan(build(Two), (inputs(),), cluster="local-cpu", mode="infer")
    assert set(plan.operators["first/matmul"].strategy) == {"m"}
    with pytest.raises(UsageError, match="goes on from operators that are cut"):
        autopar.plan(build(_few), (inputs(),), cluster="local-cpu")


@pytest.mark.parametrize(("mode", "factors"), [("semi_auto_parallel", {"d0"}), ("auto_parallel", {"n", "k"})])
def test_auto_parallel_finds_what_data_parallelism_is_not(mode: str, factors: set[str]) -> None:
    """Wide layers of few rows: to sum their gradients takes longer than to split them."""
    with torch.device("meta"):
        net, x = nn.Sequential(*(nn.Linear(16384, 16384, bias=False) for _ in range(2))), torch.empty(64, 16384)
    autopar.set_auto_parallel_context(parallel_mode=mode, device_num=8, full_batch=True)
    plan = autopar.plan(net, (x,), cluster="dgx-a100-80g", optimizer="sgd")
    assert set().union(*(op.strategy for op in plan.operators.values() if "linear" in op.kind)) == factors


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_are_those_of_the_context(stages: int) -> None:
    autopar.set_auto_parallel_context(device_num=4, parallel_mode="auto_parallel", pipeline_stages=stages)
    plan = autopar.plan(build(lambda: Many(4)), (inputs(),), cluster="local-cpu", optimizer="sgd")
    assert plan.devices == 4
    assert max(len(plan.stages), 1) == stages


def test_fusion_cuts_the_reductions_of_fifty_parameters_in_three() -> None:
    plan = _plan(build(Many), parallel_mode="data_parallel", all_reduce_fusion_config=[20, 35])
    backwards = list(reversed(list(plan.parameters)))
    assert [sorted(one) for one in _reduced(plan)] == [sorted(backwards[:20]), sorted(backwards[20:35]), sorted(backwards[35:])]
    priced = [c for c in plan.collectives if c.kind == "all_reduce" and c.nbytes > 8]
    assert len(priced) == 3
    autopar.set_auto_parallel_context(all_reduce_fusion_config=[])
    assert len(_reduced(_plan(build(Many), parallel_mode="data_parallel"))) == 1


def test_fusion_numbers_of_modules_are_sets() -> None:
    module = build(_few)
    for layer, number in ((0, 1), (2, 1), (1, 0)):
        autopar.add_prim_attr(module.get_submodule(f"layers.{layer}"), "fusion", number)
    plan = _plan(module, parallel_mode="data_parallel")
    assert plan.schedule.reductions.fused == (
        ("layers.0.weight", "layers.0.bias", "layers.2.weight", "layers.2.bias"), ("layers.1.weight",), ("layers.1.bias",),
    )  # fmt: skip
    found = load_model(module, ModelOptions(train=True), (inputs(),))
    (chunk,) = plan.execution(analyse(found.graph, train=True)).chunks
    assert sorted(sorted(b.parameters) for b in chunk.whole.buckets) == sorted(map(sorted, plan.schedule.reductions.fused))


@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel"])
def test_fusion_numbers_merge_gathers_too(mode: str) -> None:
    """Of weights that are stored in parts: collectives of one kind and one number are one, those of number 0 alone."""
    module = build(lambda: Many(4))
    for layer, number in ((0, 1), (2, 1), (1, 0), (3, 2)):
        autopar.add_prim_attr(module.get_submodule(f"layers.{layer}"), "fusion", number)
    plan = _plan(module, parallel_mode=mode, enable_parallel_optimizer=True)
    weight, bias = 8 * 12 * 12, 8 * 12
    sizes = [2 * (weight + bias), weight, bias, weight + bias]
    found = [(c.kind, c.nbytes) for c in plan.collectives if c.nbytes > 8]
    assert found == [("all_gather", size) for size in sizes] + [("reduce_scatter", size) for size in (sizes[3], bias, weight, sizes[0])]
    assert all(op.strategy == ("d0",) for op in plan.operators.values())  # no micro-batch is too small to be split


@pytest.mark.parametrize(("synced", "found"), [(True, "float32"), (False, None)])
def test_sixteen_bit_gradients_travel_in_float32(synced: bool, found: str | None) -> None:
    autopar.set_auto_parallel_context(device_num=RANKS, parallel_mode="data_parallel", gradient_fp32_sync=synced)
    plan = autopar.plan(build(_few).to(torch.bfloat16), (inputs().to(torch.bfloat16),), cluster="local-cpu", optimizer="sgd")
    assert plan.schedule.reduce == found


@pytest.mark.parametrize(("synced", "nbytes"), [(True, 4), (False, 2)])
def test_gradients_of_a_sixteen_bit_computation_travel_in_the_type_of_the_key(synced: bool, nbytes: int) -> None:
    """Its parameters are stored in float32, in which their gradients travel unless the key says otherwise."""
    autopar.set_auto_parallel_context(device_num=RANKS, parallel_mode="data_parallel", gradient_fp32_sync=synced)
    plan = autopar.plan(build(_few).float(), (inputs().float(),), cluster="local-cpu", optimizer="sgd", dtype="bfloat16")
    assert sum(c.nbytes for c in plan.collectives if c.kind == "all_reduce" and c.nbytes > 8) == nbytes * 3 * (12 * 12 + 12)


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
        autopar.plan(build(_few), (inputs(),), cluster="local-cpu", **given)


def test_marks_are_for_their_modes() -> None:
    with pytest.raises(UsageError, match="semi_auto_parallel and auto_parallel"):
        _plan(build(Two), parallel_mode="data_parallel")
    module = build(_few)
    autopar.layerwise_parallel(next(module.parameters()))
    with pytest.raises(UsageError, match="for the mode hybrid_parallel"):
        _plan(module, parallel_mode="data_parallel")


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


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (lambda: autopar.shard(torch.matmul, (4, 1)), "no tuple of whole numbers"),
        (lambda: autopar.shard(torch.matmul, ((0, 1),)), "from 1 on"),
        (lambda: autopar.shard(torch.matmul, ()), "no tuple of tuples"),
        (lambda: autopar.shard("matmul", ((1, 1),)), "a module or a function"),
        (lambda: autopar.add_prim_attr(nn.Linear(1, 1), "fuse", 1), "valid are cross_batch, fusion"),
        (lambda: autopar.add_prim_attr(nn.Linear(1, 1), "fusion", -1), "from 0 on"),
        (lambda: autopar.add_prim_attr(nn.Linear(1, 1), "cross_batch", 1), "True or False"),
        (lambda: autopar.add_prim_attr(torch.matmul, "fusion", 1), "belong to modules"),
        (lambda: autopar.layerwise_parallel(nn.Linear(1, 1)), "marks parameters"),
    ],
)
def test_wrong_marks_are_refused(call: Callable[[], object], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        call()


# --- the program ---


def _part(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _gradients(build_: Callable[[], nn.Module], plan: Plan, keys: Mapping[str, Any], batch: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    autopar.set_auto_parallel_context(device_num=RANKS, **keys)
    module = autopar.parallelize(build_(), plan)
    loss = module.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    found = {name: value.grad for name, value in module.named_parameters() if value.grad is not None}
    return {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}, loss.detach()


def _close(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], factor: float = 1.0) -> bool:
    return found.keys() == wanted.keys() and all(torch.allclose(found[n], wanted[n] * factor, rtol=1e-9) for n in wanted)


MODES: list[tuple[dict[str, Any], bool, float]] = [
    ({"parallel_mode": "data_parallel"}, False, 2.0),
    ({"parallel_mode": "data_parallel", "gradients_mean": True}, False, 1.0),
    ({"parallel_mode": "data_parallel"}, True, 1.0),
    ({"parallel_mode": "data_parallel", "gradients_mean": True}, True, 0.5),
    ({"parallel_mode": "data_parallel", "gradients_mean": True, "enable_parallel_optimizer": True}, False, 1.0),
    ({"parallel_mode": "data_parallel", "enable_parallel_optimizer": True}, False, 2.0),
    ({"parallel_mode": "semi_auto_parallel"}, False, 1.0),
    ({"parallel_mode": "semi_auto_parallel", "gradients_mean": True}, False, 0.5),
    ({"parallel_mode": "semi_auto_parallel", "full_batch": True}, False, 1.0),
    ({"parallel_mode": "data_parallel", "all_reduce_fusion_config": [2, 3]}, False, 2.0),
]
"""Keys, whether the loss is a sum, and how many times the gradient of one device there is."""


def test_gradients_are_those_of_the_mode_and_each_rank_is_given_its_part() -> None:
    plans = []
    for keys, total, _ in MODES:
        autopar.reset_auto_parallel_context()
        plans.append(_plan(build(lambda total=total: Many(3, total=total)), **keys))  # type: ignore[misc]
    wanted = {total: gradients_of(build(lambda total=total: Many(3, total=total)), inputs()) for total in (False, True)}  # type: ignore[misc]

    def work() -> list[bool]:
        found = []
        for plan, (keys, total, factor) in zip(plans, MODES, strict=True):
            autopar.reset_auto_parallel_context()
            batch = inputs() if keys.get("full_batch") else _part(inputs())
            got, _ = _gradients(lambda total=total: build(lambda: Many(3, total=total)), plan, keys, batch)  # type: ignore[misc]
            found.append(_close(got, wanted[total], factor))
        return found

    for rank in run_ranks(work, RANKS, timeout=120):
        assert all(rank), [keys for keys, right in zip(MODES, rank, strict=True) if not right]


def test_stages_with_cut_operators_and_batches_in_parts() -> None:
    keys = {"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2, "device_num": 4}
    autopar.set_auto_parallel_context(**keys)
    plan = autopar.plan(build(Waists), (inputs(),), cluster="local-cpu", optimizer="sgd")
    assert len(plan.stages) == 2
    assert plan.operators["layers.1/linear"].strategy == ("n",) and set(plan.operators["layers.4/linear"].strategy) <= {"d0", "m"}
    wanted = gradients_of(build(Waists), inputs())

    def work() -> list[str]:
        module = autopar.parallelize(build(Waists), plan)
        module.loss(inputs().chunk(2)[dist.get_rank() % 2]).backward()  # type: ignore[no-untyped-call]
        held = {name: value.grad for name, value in module.named_parameters() if name in wanted and value.grad is not None}
        whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in held.items() if g.numel()}
        assert all(torch.allclose(g, wanted[name], rtol=1e-9) for name, g in whole.items())
        return list(whole)

    assert set().union(*run_ranks(work, 4, timeout=60)) == set(wanted)


@pytest.mark.parametrize("wrong", [(0, 1), (1,)], ids=["all", "one"])
def test_a_whole_batch_without_full_batch_is_refused_everywhere(wrong: tuple[int, ...]) -> None:
    plan = _plan(build(_few), parallel_mode="data_parallel")

    def work() -> str:
        module = autopar.parallelize(build(_few), plan)
        try:
            module.loss(inputs() if dist.get_rank() in wrong else _part(inputs()))
        except AutoparError as error:
            return str(error)
        return ""

    assert all("each of 2 ranks is given its part, float64 [4, 12]" in text for text in run_ranks(work, RANKS, timeout=60))


def test_in_stand_alone_the_one_device_is_given_the_whole_batch() -> None:
    plan = _plan(build(_few), parallel_mode="stand_alone")

    def work() -> float:
        return float(autopar.parallelize(build(_few), plan).loss(inputs()).detach())

    found = run_ranks(work, RANKS, timeout=60)  # the other rank is idle
    assert found[0] == pytest.approx(float(build(_few)(inputs()).detach()))


def test_three_reductions_are_issued() -> None:
    plan = _plan(build(Many), parallel_mode="data_parallel", all_reduce_fusion_config=[20, 35])

    def work() -> list[int]:
        module = autopar.parallelize(build(Many), plan)
        part = _part(inputs())
        module.loss(part)
        with CollectiveLog() as log:
            module.loss(part).backward()  # type: ignore[no-untyped-call]
        sizes = {name: value.numel() * 8 for name, value in module.named_parameters()}
        assert sum(sizes.values()) == sum(issued.nbytes for _, issued in log.issued if issued.nbytes > 8)
        return [issued.nbytes for _, issued in log.issued if issued.kind == "all_reduce" and issued.nbytes > 8]

    weight, bias = 8 * 12 * 12, 8 * 12
    layer = weight + bias
    for sizes in run_ranks(work, RANKS, timeout=60):
        assert sizes == [10 * layer, 7 * layer + sizes[1] % layer, 25 * layer - sizes[0] - sizes[1]] and sizes[1] % layer in (weight, bias)


def test_parameters_of_every_rank_are_its_own() -> None:
    def own(module: nn.Module) -> nn.Module:
        autopar.layerwise_parallel(module.get_submodule("layers.1").weight)  # type: ignore[arg-type]
        return module

    keys = {"parallel_mode": "hybrid_parallel", "gradients_mean": True}
    plan = _plan(own(build(_few)), **keys)
    assert plan.schedule.reductions.local == ("layers.1.weight",)

    def rank_model() -> nn.Module:
        module = own(build(_few))
        with torch.no_grad():
            module.get_submodule("layers.1").weight.mul_(1.0 + dist.get_rank())  # type: ignore[operator, union-attr]
        return module

    def work() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        got, _ = _gradients(rank_model, plan, keys, _part(inputs()))
        return got, gradients_of(rank_model(), _part(inputs()))

    every = run_ranks(work, RANKS, timeout=60)
    for got, local in every:
        for name in got:
            mean = torch.stack([other[1][name] for other in every]).mean(0)
            assert torch.allclose(got[name], local[name] if name == "layers.1.weight" else mean, rtol=1e-9), name
    assert not torch.allclose(every[0][0]["layers.1.weight"], every[1][0]["layers.1.weight"])


def test_a_parameter_whose_gradient_must_be_summed_is_no_ranks_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 12, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            alone = torch.linalg.qr(self.layer.weight)[1].diagonal().prod()  # computed whole on every rank
            return self.layer(x).square().mean() + alone.square()

    module = build(Net)
    autopar.layerwise_parallel(module.get_parameter("layer.weight"))
    with pytest.raises(UsageError, match="a parameter for each use"):
        _plan(module, parallel_mode="hybrid_parallel")


def test_rank_0_gives_all_ranks_its_weights() -> None:
    plan = _plan(build(_few), parallel_mode="data_parallel")

    def work(broadcast: bool) -> str | float:
        autopar.set_auto_parallel_context(parameter_broadcast=broadcast)
        try:
            module = autopar.parallelize(build(_few, seed=dist.get_rank()), plan)
        except PlanError as error:
            return str(error)
        return float(next(module.parameters()).detach().sum())

    assert set(run_ranks(work, RANKS, True, timeout=60)) == {float(next(build(_few, seed=0).parameters()).detach().sum())}
    assert all("the weights" in str(text) for text in run_ranks(work, RANKS, False, timeout=60))


@pytest.mark.parametrize(("kind", "marked"), [(Normed, "mean"), (BatchNormed, "norm")])
def test_cross_batch_keeps_the_statistics_of_data_parallelism(kind: Callable[[], nn.Module], marked: str) -> None:
    def made(alone: bool) -> nn.Module:
        module = build(kind)
        autopar.add_prim_attr(module.get_submodule(marked), "cross_batch", alone)
        return module

    plans = {alone: _plan(made(alone), parallel_mode="semi_auto_parallel") for alone in (False, True)}
    parts = [float(build(kind)(part).detach()) for part in inputs().chunk(RANKS)]

    def work(alone: bool) -> tuple[float, dict[str, Tensor]]:
        got, loss = _gradients(lambda: made(alone), plans[alone], {"parallel_mode": "semi_auto_parallel"}, _part(inputs()))
        return float(loss), got

    whole = build(kind)
    wanted = gradients_of(whole, inputs())
    for loss, got in run_ranks(work, RANKS, False, timeout=60):
        assert loss == pytest.approx(float(build(kind)(inputs()).detach())) and _close(got, wanted)
    mean = {n: torch.stack([gradients_of(build(kind), part)[n] for part in inputs().chunk(RANKS)]).mean(0) for n in wanted}
    for loss, got in run_ranks(work, RANKS, True, timeout=60):
        assert loss == pytest.approx(sum(parts) / RANKS) and _close(got, mean)
        assert not _close(got, wanted)


def test_gradients_are_added_up_in_float32_bit_for_bit() -> None:
    """Of four ranks: the sum of 16-bit gradients in float32 and rounded once, or rounded at every addition."""

    def model() -> nn.Module:
        return build(lambda: Many(1)).to(torch.bfloat16)

    batch = inputs().to(torch.bfloat16) * 3
    plans = {}
    for synced in (True, False):
        autopar.reset_auto_parallel_context()
        autopar.set_auto_parallel_context(device_num=4, parallel_mode="data_parallel", gradient_fp32_sync=synced, gradients_mean=True)
        plans[synced] = autopar.plan(model(), (batch,), cluster="local-cpu", optimizer="sgd")

    def work() -> dict[bool, tuple[Tensor, Tensor]]:
        found = {}
        for synced, plan in plans.items():
            module = autopar.parallelize(model(), plan)
            shares: list[Tensor] = []
            with module.no_sync():
                pass
            module.loss(_part(batch)).backward()  # type: ignore[no-untyped-call]
            grad = module.get_parameter("layers.0.weight").grad
            assert grad is not None
            alone = model()
            (alone(_part(batch)) / 4).backward()
            own = alone.get_parameter("layers.0.weight").grad
            assert own is not None
            gathered = [torch.empty_like(own) for _ in range(4)]
            dist.all_gather(gathered, own)
            shares += gathered
            exact = torch.stack(shares).float().sum(0).to(torch.bfloat16)
            found[synced] = grad.full_tensor() if isinstance(grad, DTensor) else grad, exact
        return found

    for found in run_ranks(work, 4, timeout=120):
        assert torch.equal(*found[True])
        assert not torch.equal(*found[False])
