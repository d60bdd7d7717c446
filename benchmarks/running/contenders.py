"""The contenders: autopar under a plan, and its rivals, each as torch's documentation shows it.

A contender's step is a whole one: gradients dropped, forward and backward pass, AdamW.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.plan import Plan

from .gpt2 import Shape, batch, cross_entropy
from .models import model

Step = Callable[[int], Tensor | None]
"""Makes the step of a number; this rank's loss, None where it has none."""
MICRO_BATCHES = 4
"""Micro-batches of every pipeline."""
RATE = 1e-3
"""The learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The plan that autopar runs (`scheme` and arguments of `autopar.plan`), and its rival."""

    scheme: str
    asked: dict[str, Any]
    build: Callable[[Shape], Step]
    stages: bool = False


def ours(shape: Shape, plan: Plan, *, on_shards: bool = False) -> Step:
    """The model under a plan; `on_shards`: updated as `autopar run` does, not as DTensors."""
    module = autopar.parallelize(model(shape), plan)
    updated = autopar.local_optimizer(torch.optim.AdamW, module, lr=RATE) if on_shards else None
    return _loop(module, lambda number: batch(shape, number), updated)


def _loop(
    module: nn.Module,
    inputs: Callable[[int], tuple[Tensor, Tensor]],
    updated: torch.optim.Optimizer | None = None,
) -> Step:
    optimizer = updated or adamw(module.parameters())

    def step(number: int) -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(*inputs(number))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        return loss.detach()

    return step


def adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    """The optimizer of all."""
    return torch.optim.AdamW(parameters, lr=RATE)


def _share(shape: Shape) -> Callable[[int], tuple[Tensor, Tensor]]:
    """This rank's part of the batch."""
    size = shape.batch // dist.get_world_size()
    own = slice(dist.get_rank() * size, (dist.get_rank() + 1) * size)
    return lambda number: (batch(shape, number)[0][own], batch(shape, number)[1][own])


def _ddp(shape: Shape) -> Step:
    from torch.nn.parallel import DistributedDataParallel

    return _loop(DistributedDataParallel(model(shape), gradient_as_bucket_view=True), _share(shape))


def _fsdp(reshard: bool) -> Callable[[Shape], Step]:
    def build(shape: Shape) -> Step:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module = model(shape)
        for block in module.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        return _loop(module, _share(shape))

    return build


def _tensor_parallel(shape: Shape) -> Step:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    columns = ("query", "key", "value", "gate", "up")
    rows = ("out", "down")
    module = model(shape)
    for block in module.blocks:
        parallelize_module(
            block,
            mesh,
            {name: ColwiseParallel() for name in columns if hasattr(block, name)}
            | {name: RowwiseParallel() for name in rows},
        )
    return _loop(module, lambda number: batch(shape, number))


def _pipeline(name: str) -> Callable[[Shape], Step]:
    def build(shape: Shape) -> Step:
        from torch.distributed import pipelining

        rank = dist.get_rank()
        count = dist.get_world_size()
        module = model(shape).stage(rank, count)
        schedule = getattr(pipelining, name)(
            pipelining.PipelineStage(module, rank, count, torch.device("cpu")),
            n_microbatches=MICRO_BATCHES,
            loss_fn=cross_entropy,
        )
        optimizer = adamw(module.parameters())

        def step(number: int) -> Tensor | None:
            tokens, targets = batch(shape, number)
            optimizer.zero_grad()
            losses: list[Tensor] = []
            given = (tokens,) if rank == 0 else ()
            schedule.step(
                *given, **({"target": targets, "losses": losses} if rank == count - 1 else {})
            )
            optimizer.step()
            return torch.stack(losses).mean().detach() if losses else None

        return step

    return build


def _one_rank(shape: Shape) -> Step:
    """The plain model on rank 0; the others wait."""
    if dist.get_rank():
        return lambda number: None
    return _loop(model(shape), lambda number: batch(shape, number))


def _stages(schedule: str) -> dict[str, Any]:
    return {"micro_batches": MICRO_BATCHES, "schedule": schedule}


RIVALS: dict[str, Rival] = {
    "ddp": Rival(scheme="data", asked={"scheme": "data"}, build=_ddp),
    "fsdp2": Rival(scheme="zero3", asked={"scheme": "zero3"}, build=_fsdp(True)),
    "fsdp2-kept": Rival(scheme="zero2", asked={"scheme": "zero2"}, build=_fsdp(False)),
    "dtensor": Rival(scheme="megatron", asked={"scheme": "megatron"}, build=_tensor_parallel),
    "torch-gpipe": Rival(
        scheme="pipeline-gpipe",
        asked=_stages("gpipe"),
        build=_pipeline("ScheduleGPipe"),
        stages=True,
    ),
    "torch-1f1b": Rival(
        scheme="pipeline-1f1b", asked=_stages("1f1b"), build=_pipeline("Schedule1F1B"), stages=True
    ),
    "one-rank": Rival(scheme="data", asked={"scheme": "data"}, build=_one_rank),
}
"""The rivals by name."""


def shares(rival: str) -> bool:
    """Whether every rank's loss covers its part of the batch."""
    return rival in ("ddp", "fsdp2", "fsdp2-kept")


def plan_of(shape: Shape, ranks: int, asked: dict[str, Any], *, stages: bool) -> Plan:
    """The plan to run; raises an error of autopar if there is none."""
    wanted = {**asked, "stages": ranks} if stages else asked
    return autopar.plan(model(shape), batch(shape), devices=ranks, cluster="local-cpu", **wanted)
