"""Plans for many ranks: 64 that run, and one of 4,096 that is made ready."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.costmodel import load_cluster
from autopar.plan import Plan
from autopar.planning.model.request import Request
from autopar.planning.planner import search_plan
from autopar.runtime.execution.collective_log import priced_on
from autopar.runtime.execution.engine import Engine
from autopar.runtime.launch import run_ranks
from autopar.runtime.ranks.world import World
from autopar.sharding.analysis import analyse
from benchmarks.tracked_memory import fake_world
from benchmarks.validating.known.shape import Shape
from benchmarks.validating.known.transformer import transformer
from tests.runtime.tied_blocks import tied_blocks, tokens


def _losses(module: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    results = []
    for _ in range(3):
        loss = module(tokens())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(float(loss))
    return results


def _on_rank(plan: Plan) -> list[float]:
    torch.set_num_threads(1)
    return _losses(autopar.parallelize(tied_blocks(4), plan, (tokens(),)))


@pytest.mark.slow
@pytest.mark.ci
def test_64_ranks_run_four_by_four_by_four() -> None:
    plan = autopar.plan(
        tied_blocks(4),
        (tokens(),),
        devices=64,
        cluster="local-cpu",
        stages=4,
        micro_batches=2,
        mesh=(4, 4),
    )
    assert plan.devices == 64 and len(plan.stages) == 4
    wanted = pytest.approx(_losses(tied_blocks(4)), rel=1e-9)
    for losses in run_ranks(_on_rank, 64, plan, timeout=400.0):
        assert losses == wanted


@pytest.mark.slow
@pytest.mark.ci
def test_one_rank_of_4096_is_ready_at_once() -> None:
    """Lowering and the order of a step, with no process group but a pretended one."""
    shape = Shape(
        layers=16,
        hidden=1024,
        heads=16,
        kv_heads=8,
        ffn=4096,
        vocab=32000,
        sequence=512,
        dropout=False,
    )
    graph = transformer(shape, batch=4096).graph
    cluster = load_cluster("dgx-h100").sized(4096)
    plan = search_plan(
        graph, Request(cluster=cluster, train=True, optimizer="adamw", stages=8, micro_batches=8)
    )
    analysis = analyse(graph, train=True)
    execution = plan.execution(analysis)
    with fake_world(4096):
        engine = Engine(
            execution, World.of(execution), torch.device("cpu"), lambda name: torch.empty(0)
        )
        order = engine.training_order
    assert execution.devices == 4096 and order
    kinds = {one.kind for _, one in priced_on(execution, 0, order)}
    assert "send" in kinds and kinds <= {
        "send",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
    }
