"""Each key of the context changes its part of the program that ranks run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.errors import AutoparError, PlanError, UsageError
from autopar.plan import Plan
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from tests.integrations.mindspore.context.nets import (
    RANKS,
    BatchNormed,
    Many,
    Normed,
    Waists,
    build,
    few,
    gradients_of,
    inputs,
    small_plan,
)


def _part(whole: Tensor) -> Tensor:
    return whole.chunk(dist.get_world_size())[dist.get_rank()]


def _gradients(
    build_: Callable[[], nn.Module], plan: Plan, keys: Mapping[str, Any], batch: Tensor
) -> tuple[dict[str, Tensor], Tensor]:
    autopar.set_auto_parallel_context(device_num=RANKS, **keys)
    module = autopar.parallelize(build_(), plan)
    loss = module.loss(batch)
    loss.backward()  # type: ignore[no-untyped-call]
    result = {
        name: value.grad for name, value in module.named_parameters() if value.grad is not None
    }
    return {
        name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in result.items()
    }, loss.detach()


def _close(actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor], factor: float = 1.0) -> bool:
    return actual.keys() == wanted.keys() and all(
        torch.allclose(actual[n], wanted[n] * factor, rtol=1e-9) for n in wanted
    )


MODES: list[tuple[dict[str, Any], bool, float]] = [
    ({"parallel_mode": "data_parallel"}, False, 2.0),
    ({"parallel_mode": "data_parallel", "gradients_mean": True}, False, 1.0),
    ({"parallel_mode": "data_parallel"}, True, 1.0),
    ({"parallel_mode": "data_parallel", "gradients_mean": True}, True, 0.5),
    (
        {
            "parallel_mode": "data_parallel",
            "gradients_mean": True,
            "enable_parallel_optimizer": True,
        },
        False,
        1.0,
    ),
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
        plans.append(small_plan(build(lambda total=total: Many(3, total=total)), **keys))  # type: ignore[misc]
    wanted = {
        total: gradients_of(build(lambda total=total: Many(3, total=total)), inputs())
        for total in (False, True)
    }  # type: ignore[misc]

    def work() -> list[bool]:
        actual = []
        for plan, (keys, total, factor) in zip(plans, MODES, strict=True):
            autopar.reset_auto_parallel_context()
            batch = inputs() if keys.get("full_batch") else _part(inputs())
            got, _ = _gradients(
                lambda total=total: build(lambda: Many(3, total=total)), plan, keys, batch
            )  # type: ignore[misc]
            actual.append(_close(got, wanted[total], factor))
        return actual

    for rank in run_ranks(work, RANKS, timeout=120):
        assert all(rank), [keys for keys, right in zip(MODES, rank, strict=True) if not right]


def test_stages_with_cut_operators_and_batches_in_parts() -> None:
    keys = {"parallel_mode": "semi_auto_parallel", "pipeline_stages": 2, "device_num": 4}
    autopar.set_auto_parallel_context(**keys)
    plan = autopar.plan(build(Waists), (inputs(),), cluster="local-cpu", optimizer="sgd")
    assert len(plan.stages) == 2
    assert plan.operators["layers.1/linear"].strategy == ("n",) and set(
        plan.operators["layers.4/linear"].strategy
    ) <= {"d0", "m"}
    wanted = gradients_of(build(Waists), inputs())

    def work() -> list[str]:
        module = autopar.parallelize(build(Waists), plan)
        module.loss(inputs().chunk(2)[dist.get_rank() % 2]).backward()  # type: ignore[no-untyped-call]
        held = {
            name: value.grad
            for name, value in module.graph_parameters().items()
            if name in wanted and value.grad is not None
        }
        whole = {
            name: g.full_tensor() if isinstance(g, DTensor) else g
            for name, g in held.items()
            if g.numel()
        }
        assert all(torch.allclose(g, wanted[name], rtol=1e-9) for name, g in whole.items())
        return list(whole)

    assert set().union(*run_ranks(work, 4, timeout=60)) == set(wanted)


@pytest.mark.parametrize("wrong", [(0, 1), (1,)], ids=["all", "one"])
def test_a_whole_batch_without_full_batch_is_refused_everywhere(wrong: tuple[int, ...]) -> None:
    plan = small_plan(build(few), parallel_mode="data_parallel")

    def work() -> str:
        module = autopar.parallelize(build(few), plan)
        try:
            module.loss(inputs() if dist.get_rank() in wrong else _part(inputs()))
        except AutoparError as error:
            return str(error)
        return ""

    assert all(
        "each of 2 ranks is given its part, float64 [4, 12]" in text
        for text in run_ranks(work, RANKS, timeout=60)
    )


def test_in_stand_alone_the_one_device_is_given_the_whole_batch() -> None:
    plan = small_plan(build(few), parallel_mode="stand_alone")

    def work() -> float:
        return float(autopar.parallelize(build(few), plan).loss(inputs()).detach())

    results = run_ranks(work, RANKS, timeout=60)  # the other rank is idle
    assert results[0] == pytest.approx(float(build(few)(inputs()).detach()))


def test_three_reductions_are_issued() -> None:
    plan = small_plan(build(Many), parallel_mode="data_parallel", all_reduce_fusion_config=[20, 35])

    def work() -> list[int]:
        module = autopar.parallelize(build(Many), plan)
        part = _part(inputs())
        module.loss(part)
        with CollectiveLog() as log:
            module.loss(part).backward()  # type: ignore[no-untyped-call]
        sizes = {name: value.numel() * 8 for name, value in module.named_parameters()}
        assert sum(sizes.values()) == sum(
            issued.nbytes for _, issued in log.issued if issued.nbytes > 8
        )
        return [
            issued.nbytes
            for _, issued in log.issued
            if issued.kind == "all_reduce" and issued.nbytes > 8
        ]

    weight = 8 * 12 * 12
    bias = 8 * 12
    layer = weight + bias
    for sizes in run_ranks(work, RANKS, timeout=60):
        assert sizes == [
            10 * layer,
            7 * layer + sizes[1] % layer,
            25 * layer - sizes[0] - sizes[1],
        ] and sizes[1] % layer in (weight, bias)


def test_parameters_of_every_rank_are_its_own() -> None:
    def own(module: nn.Module) -> nn.Module:
        autopar.layerwise_parallel(module.get_submodule("layers.1").weight)  # type: ignore[arg-type]
        return module

    keys = {"parallel_mode": "hybrid_parallel", "gradients_mean": True}
    plan = small_plan(own(build(few)), **keys)
    assert plan.schedule.reductions.local == ("layers.1.weight",)

    def rank_model() -> nn.Module:
        module = own(build(few))
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
            assert torch.allclose(
                got[name], local[name] if name == "layers.1.weight" else mean, rtol=1e-9
            ), name
    assert not torch.allclose(every[0][0]["layers.1.weight"], every[1][0]["layers.1.weight"])


def test_a_parameter_whose_gradient_must_be_summed_is_no_ranks_own() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(12, 12, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            alone = (
                torch.linalg.qr(self.layer.weight)[1].diagonal().prod()
            )  # computed whole on every rank
            return self.layer(x).square().mean() + alone.square()

    module = build(Net)
    autopar.layerwise_parallel(module.get_parameter("layer.weight"))
    with pytest.raises(UsageError, match="a parameter for each use"):
        small_plan(module, parallel_mode="hybrid_parallel")


def test_rank_0_gives_all_ranks_its_weights() -> None:
    plan = small_plan(build(few), parallel_mode="data_parallel")

    def work(broadcast: bool) -> str | float:
        autopar.set_auto_parallel_context(parameter_broadcast=broadcast)
        try:
            module = autopar.parallelize(build(few, seed=dist.get_rank()), plan)
        except PlanError as error:
            return str(error)
        return float(next(module.parameters()).detach().sum())

    assert set(run_ranks(work, RANKS, True, timeout=60)) == {
        float(next(build(few, seed=0).parameters()).detach().sum())
    }
    assert all("the weights" in str(text) for text in run_ranks(work, RANKS, False, timeout=60))


@pytest.mark.parametrize(("kind", "marked"), [(Normed, "mean"), (BatchNormed, "norm")])
def test_cross_batch_keeps_the_statistics_of_data_parallelism(
    kind: Callable[[], nn.Module], marked: str
) -> None:
    def made(alone: bool) -> nn.Module:
        module = build(kind)
        autopar.add_prim_attr(module.get_submodule(marked), "cross_batch", alone)
        return module

    plans = {
        alone: small_plan(made(alone), parallel_mode="semi_auto_parallel")
        for alone in (False, True)
    }
    parts = [float(build(kind)(part).detach()) for part in inputs().chunk(RANKS)]

    def work(alone: bool) -> tuple[float, dict[str, Tensor]]:
        got, loss = _gradients(
            lambda: made(alone),
            plans[alone],
            {"parallel_mode": "semi_auto_parallel"},
            _part(inputs()),
        )
        return float(loss), got

    whole = build(kind)
    wanted = gradients_of(whole, inputs())
    for loss, got in run_ranks(work, RANKS, False, timeout=60):
        assert loss == pytest.approx(float(build(kind)(inputs()).detach())) and _close(got, wanted)
    mean = {
        n: torch.stack([gradients_of(build(kind), part)[n] for part in inputs().chunk(RANKS)]).mean(
            0
        )
        for n in wanted
    }
    for loss, got in run_ranks(work, RANKS, True, timeout=60):
        assert loss == pytest.approx(sum(parts) / RANKS) and _close(got, mean)
        assert not _close(got, wanted)


def test_gradients_are_added_up_in_float32_bit_for_bit() -> None:
    """Four ranks add up 16-bit gradients in float32 and round once, or round at every addition."""

    def model() -> nn.Module:
        return build(lambda: Many(1)).to(torch.bfloat16)

    batch = inputs().to(torch.bfloat16) * 3
    plans = {}
    for synced in (True, False):
        autopar.reset_auto_parallel_context()
        autopar.set_auto_parallel_context(
            device_num=4,
            parallel_mode="data_parallel",
            gradient_fp32_sync=synced,
            gradients_mean=True,
        )
        plans[synced] = autopar.plan(model(), (batch,), cluster="local-cpu", optimizer="sgd")

    def work() -> dict[bool, tuple[Tensor, Tensor]]:
        results = {}
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
            results[synced] = grad.full_tensor() if isinstance(grad, DTensor) else grad, exact
        return results

    for result in run_ranks(work, 4, timeout=120):
        assert torch.equal(*result[True])
        assert not torch.equal(*result[False])
