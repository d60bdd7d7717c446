"""PyTorch's `torch.distributed.pipelining`: split points and a schedule, with DDP or FSDP2 within each stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..printable import printable
from .fsdp2 import units_of
from .handed import handed_otherwise
from .setup import Converted, Setup
from .splits import Cut, split_points

TARGET = "pipelining"
SCHEDULES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}  # fmt: skip
"""The class of each schedule, which has the same order; with one chunk on each rank the last is ZB-H1, as autopar's is."""
SINGLE = ("gpipe", "1f1b")
"""Schedules whose class takes one stage, not a list of them."""


def pipelining(setup: Setup) -> Converted:
    """The file: `pipelined(module, example, loss)`, to be called on every rank."""
    if setup.stages == 1:
        setup.refuse(TARGET, "a plan without pipeline stages (fsdp2 and dtensor write those)")
    setup.refuse(TARGET, *_lacks(setup), *_schedule_lacks(setup))
    cuts = split_points(setup.plan)
    setup.refuse(TARGET, *(cut.why for cut in cuts), *handed_otherwise(setup.plan), _twice(cuts))
    pipeline, lost = setup.plan.schedule.pipeline, tuple(_lost(setup))
    policy = setup.plan.schedule
    text = _FILE.format(
        model=printable(setup.plan.model.name, lines=False), ranks=setup.plan.devices, notes="".join(f"#   {note}\n" for note in lost),
        schedule=SCHEDULES[pipeline], stages=setup.stages, chunks=policy.interleave, micro_batches=policy.micro_batches,
        replicas=setup.degree("data") // setup.shards, shards=setup.shards, units=units_of(setup.plan), reshard=setup.zero == 3,
        splits="\n".join(f"    {cut.module!r}: SplitPoint.{cut.point}," for cut in cuts),
        reduce=f"torch.{policy.reduce}" if policy.reduce else "None", held="stages[0]" if pipeline in SINGLE else "stages",
    )  # fmt: skip
    return Converted(text=text, lost=lost)


def _lacks(setup: Setup) -> Iterable[str]:
    """What no stage of the target does, whatever its order."""
    plan = setup.plan
    yield "" if plan.model.mode == "train" else "inference: its schedules are written for training"
    yield setup.lacking("tensor", "splitting weights within a stage")
    yield setup.lacking("sequence", "splitting the sequence")
    yield setup.lacking("expert", "splitting experts")
    if any(parameter.state == "host" for parameter in plan.parameters.values()):
        yield "optimizer state in host memory"
    if setup.recompute != "none":
        yield f"recompute ({setup.recompute}), since a stage is a traced graph without the forward functions of its modules"
    if plan.schedule.master:
        yield f"parameters stored in {plan.schedule.master} and used in another type, since values between stages are of the traced type"
    if plan.schedule.reduce and setup.zero == 0:
        yield f"gradients in {plan.schedule.reduce} of parameters that every device stores whole (ZeRO 0)"
    if any(operator.kind.startswith("onnx.") for operator in plan.operators.values()):
        yield "a model from an ONNX file, which has no modules to split at"


def _schedule_lacks(setup: Setup) -> Iterable[str]:
    """What the schedule's class demands that the plan does not keep."""
    schedule = setup.plan.schedule
    count, stages = schedule.micro_batches, setup.stages
    yield setup.pipeline_beyond(SCHEDULES)
    if schedule.interleave > 1 and schedule.pipeline != "interleaved":
        yield f"{schedule.interleave} chunks on each stage under the schedule {schedule.pipeline}"
    if schedule.pipeline == "interleaved" and count % stages:
        yield f"interleaved with {count} micro-batches, which are no multiple of {stages} stages"
    if schedule.pipeline == "1f1b" and count < stages:
        yield f"1f1b with {count} micro-batches on {stages} stages, of which there must be at least as many"
    if schedule.pipeline == "zero_bubble" and setup.degree("data") > 1:
        yield "zero_bubble with data parallelism, whose weight gradients are made where no reduction sees them"


def _twice(cuts: Iterable[Cut]) -> str:
    """A module at whose beginning and end stages are cut, which a mapping from modules to points cannot say."""
    modules = [cut.module for cut in cuts]
    both = [name for name in dict.fromkeys(modules) if name and modules.count(name) > 1]
    return f"stages cut before and after {', '.join(map(repr, both))}" if both else ""


def _lost(setup: Setup) -> Iterable[str]:
    yield from setup.lost
    if setup.zero >= 2:
        yield "gradients are added up whole and reduced once a step (ZeRO 1), which takes more memory than the plan's shards"
    if setup.zero == 3:
        yield "parameters stay gathered from a stage's first backward pass to the end of the step"


_FILE = '''# A plan for {model} on {ranks} ranks, as torch.distributed.pipelining takes it.
# Call pipelined(module, example, loss) on every rank of torchrun, with the module on its device, before the optimizer is made.
#   example: the positional inputs of one micro-batch of one rank; loss(output, target): the mean over a micro-batch.
#   It gives the schedule and this rank's modules, whose parameters the optimizer takes. A step, with this rank's share of the batch:
#   schedule.step(*inputs) on the first stage, schedule.step(target=target, losses=losses) on the last, schedule.step() between.
{notes}
from fnmatch import fnmatchcase
from typing import Any

import torch  # noqa: F401
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import SplitPoint, build_stage, pipeline
from torch.distributed.pipelining import {schedule} as Schedule
from torch.nn.parallel import DistributedDataParallel

STAGES, CHUNKS, REPLICAS, SHARDS = {stages}, {chunks}, {replicas}, {shards}
MICRO_BATCHES = {micro_batches}
SPLITS = {{
{splits}
}}
UNITS = {units}
POLICY = MixedPrecisionPolicy(reduce_dtype={reduce})


def pipelined(module: nn.Module, example: tuple[Any, ...], loss: Any) -> tuple[Schedule, nn.ModuleList]:
    device = next(module.parameters()).device
    mesh = init_device_mesh(device.type, (STAGES, REPLICAS, SHARDS), mesh_dim_names=("stages", "replicas", "shards"))
    pipe = pipeline(module, example, split_spec=SPLITS)
    if pipe.num_stages != STAGES * CHUNKS:
        raise ValueError(f"the module is split into {{pipe.num_stages}} parts, not {{STAGES * CHUNKS}}: is one of SPLITS called twice?")
    numbers = range(mesh.get_local_rank("stages"), STAGES * CHUNKS, STAGES)
    parts = [within_stage(pipe.get_stage_module(number), mesh) for number in numbers]
    group = mesh.get_group("stages")
    stages = [build_stage(part, number, pipe.info(), device, group) for part, number in zip(parts, numbers)]
    return Schedule({held}, MICRO_BATCHES, loss_fn=loss), nn.ModuleList(parts)


def within_stage(part: nn.Module, whole: DeviceMesh) -> nn.Module:
    if SHARDS > 1:
        mesh = whole["replicas", "shards"] if REPLICAS > 1 else whole["shards"]
        for name, inner in part.named_modules():
            if any(fnmatchcase(name, unit) for unit in UNITS) and name.rpartition(".")[2].isdecimal():
                fully_shard(inner, mesh=mesh, mp_policy=POLICY, reshard_after_forward={reshard})
        return fully_shard(part, mesh=mesh, mp_policy=POLICY, reshard_after_forward={reshard})
    if REPLICAS > 1:
        replicated = DistributedDataParallel(part, process_group=whole.get_group("replicas"))
        replicated.graph = part.graph  # of which the stage reads what it receives
        return replicated
    return part
'''
