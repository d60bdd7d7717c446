"""Batches that come in parts: gathered, at a price, where the plan reads them otherwise; for
nothing where it does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import autopar
from autopar.plan import Plan
from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from tests.integrations.mindspore.context.nets import (
    BATCH,
    WIDTH,
    Many,
    Waists,
    build,
    gradients_of,
    inputs,
)

RANKS = 4
BYTES = BATCH * WIDTH * 8


class _Wide(nn.Module):
    """Its first product is cut by its weight's columns alone, so that each device reads the whole
    batch.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = autopar.shard(nn.Linear(WIDTH, 8), ((1, 1), (4, 1)))
        self.second = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        output: Tensor = self.second(torch.tanh(self.first(x))).square().mean()
        return output


class _Both(_Wide):
    """It reads the batch whole, and cut."""

    def forward(self, x: Tensor) -> Tensor:
        """The loss."""
        return super().forward(x) + torch.sin(x).sum(1).square().mean()


def _few() -> nn.Module:
    return Many(2)


SEMI = {"parallel_mode": "semi_auto_parallel"}
CASES: list[tuple[Callable[[], nn.Module], dict[str, Any], dict[str, Any], list[int]]] = [
    (_few, {"parallel_mode": "data_parallel"}, {}, []),
    (
        _few,
        {
            "parallel_mode": "data_parallel",
            "enable_parallel_optimizer": True,
            "optimizer_weight_shard_size": 2,
        },
        {},
        [],
    ),
    (_few, SEMI, {"micro_batches": 2, "mesh": (RANKS,)}, [BYTES]),
    (_Wide, SEMI, {"mesh": (RANKS,)}, [BYTES]),
    (_Both, SEMI, {"mesh": (RANKS,)}, [BYTES]),
    (
        Waists,
        SEMI | {"pipeline_stages": 2},
        {"micro_batches": 2},
        [BYTES],
    ),  # of the first stage alone: the second reads none
]
"""A model, keys, what else is told to `plan`, and what is gathered of its batch."""


def _planned(kind: Callable[[], nn.Module], keys: dict[str, Any], told: dict[str, Any]) -> Plan:
    autopar.reset_auto_parallel_context()
    autopar.set_auto_parallel_context(device_num=RANKS, **keys)
    return autopar.plan(build(kind), (inputs(),), cluster="local-cpu", optimizer="sgd", **told)


def _of_the_batch(plan: Plan) -> list[Any]:
    return [c for c in plan.collectives if c.tensor == "x" and c.kind == "all_gather"]


def test_parts_are_gathered_where_the_plan_reads_more_and_that_is_priced() -> None:
    plans = [_planned(kind, keys, told) for kind, keys, told, _ in CASES]
    for plan, (kind, keys, told, gathered) in zip(plans, CASES, strict=True):
        assert [c.nbytes for c in _of_the_batch(plan)] == gathered, (kind, keys)
        whole = (
            _planned(kind, keys | {"full_batch": True}, told)
            if keys["parallel_mode"] != "data_parallel"
            else plan
        )
        extra = sum(c.seconds for c in _of_the_batch(plan))
        assert plan.predicted.step == pytest.approx(whole.predicted.step + extra) and (
            extra > 0
        ) == bool(gathered)
        assert plan.predicted.communication == pytest.approx(whole.predicted.communication + extra)
        gap = plan.provenance.gap
        bound = plan.provenance.lower_bound
        assert gap is None or gap == pytest.approx(plan.predicted.step / bound - 1)

    def work() -> list[tuple[bool, list[tuple[str, int]]]]:
        actual = []
        for plan, (kind, keys, _, _) in zip(plans, CASES, strict=True):
            autopar.reset_auto_parallel_context()
            autopar.set_auto_parallel_context(device_num=RANKS, **keys)
            module = autopar.parallelize(build(kind), plan)
            size = module.engine.world.groups.mesh.devices  # type: ignore[union-attr]
            part = inputs().chunk(size)[dist.get_rank() % size]
            with CollectiveLog() as log:
                module.loss(part).backward()  # type: ignore[no-untyped-call]
            assert not log.mismatch(module.engine.execution, dist.get_rank())
            wanted = gradients_of(build(kind), inputs())
            factor = float(size) if keys["parallel_mode"] == "data_parallel" else 1.0
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
            right = all(
                torch.allclose(g, wanted[name] * factor, rtol=1e-9) for name, g in whole.items()
            )
            actual.append((right, [(issued.kind, issued.nbytes) for issued in log.batch]))
        return actual

    for rank, every in enumerate(run_ranks(work, RANKS, timeout=120)):
        for (right, issued), (kind, keys, _, gathered) in zip(every, CASES, strict=True):
            first = "pipeline_stages" not in keys or rank < RANKS // 2
            assert right and issued == [("all_gather", nbytes) for nbytes in gathered if first], (
                rank,
                kind,
                keys,
            )


def test_parts_lie_in_the_order_of_the_devices_on_several_axes() -> None:
    """A mesh of 2 x 2 on which the batch is read whole: gathered over the inner axis first, half of
    it, then over the outer.
    """
    module = build(_few)
    for number, cuts in ((0, ((1, 1), (2, 1))), (1, ((2, 1), (2, 1)))):
        autopar.shard(module.get_submodule(f"layers.{number}"), cuts)
    autopar.set_auto_parallel_context(device_num=RANKS, parallel_mode="semi_auto_parallel")
    plan = autopar.plan(module, (inputs(),), cluster="local-cpu", mode="infer", mesh=(2, 2))
    assert plan.mesh_.shape == (2, 2)
    assert [(c.axis, c.nbytes) for c in _of_the_batch(plan)] == [
        (plan.mesh[1].name, BYTES // 2),
        (plan.mesh[0].name, BYTES),
    ]

    def work() -> tuple[float, list[tuple[str, tuple[int, ...], int]]]:
        with CollectiveLog() as log:
            loss = autopar.parallelize(module, plan)(inputs().chunk(RANKS)[dist.get_rank()])
        return float(loss.detach()), [
            (issued.kind, issued.ranks, issued.nbytes) for issued in log.batch
        ]

    wanted = float(module(inputs()).detach())
    for rank, (loss, issued) in enumerate(run_ranks(work, RANKS, timeout=60)):
        inner = (rank // 2 * 2, rank // 2 * 2 + 1)
        outer = (rank % 2, rank % 2 + 2)
        assert loss == pytest.approx(wanted) and issued == [
            ("all_gather", inner, BYTES // 2),
            ("all_gather", outer, BYTES),
        ]
