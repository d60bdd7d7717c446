"""PyTorch's `torch.distributed.pipelining`: stages cut at any operator, a schedule, and DDP or FSDP2 inside."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..printable import printable
from .fsdp2 import units_of
from .pipelined_file import BODY, HEADER
from .setup import Converted, Setup
from .splits import cuts, held_twice

TARGET = "pipelining"
SCHEDULES: Mapping[str, str] = {
    "gpipe": "ScheduleGPipe", "1f1b": "Schedule1F1B", "interleaved": "ScheduleInterleaved1F1B",
    "zero_bubble": "ScheduleInterleavedZeroBubble",
}  # fmt: skip
"""The class of each schedule, with the same order; with one chunk per rank the last one is ZB-H1, as in autopar."""
SINGLE = ("gpipe", "1f1b")
"""Schedules whose class takes a single stage, not a list."""


def pipelining(setup: Setup) -> Converted:
    """The file: `pipelined(module, example, loss)`, to be called on every rank."""
    if setup.stages == 1:
        setup.refuse(TARGET, "a plan without pipeline stages (fsdp2 and dtensor write those)")
    setup.refuse(TARGET, *setup.mixed(), *_lacks(setup), *_schedule_lacks(setup), *held_twice(setup.plan))
    pipeline, lost = setup.plan.schedule.pipeline, tuple(_lost(setup))
    policy = setup.plan.schedule
    header = HEADER.format(
        model=printable(setup.plan.model.name, lines=False), ranks=setup.ranks, notes="".join(f"#   {note}\n" for note in lost),
        schedule=SCHEDULES[pipeline], stages=setup.stages, chunks=policy.interleave, micro_batches=policy.micro_batches,
        replicas=setup.degree("data") // setup.shards, shards=setup.shards, units=units_of(setup.plan), reshard=setup.zero == 3,
        splits="\n".join(f"    ({name!r}, {after})," for name, after in cuts(setup.plan)),
        reduce=f"torch.{policy.reduce}" if policy.reduce else "None", single=pipeline in SINGLE,
    )  # fmt: skip
    return Converted(text=header + BODY, lost=lost)


def _lacks(setup: Setup) -> Iterable[str]:
    """Parts of a plan that no stage of the target can do."""
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
        yield "a model from an ONNX file, which is no module to trace"


def _schedule_lacks(setup: Setup) -> Iterable[str]:
    """Demands of the schedule's class that the plan does not meet."""
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


def _lost(setup: Setup) -> Iterable[str]:
    yield from setup.lost
    yield from setup.minor()
    if setup.zero >= 2:
        yield "gradients are added up whole and reduced once a step (ZeRO 1), which takes more memory than the plan's shards"
    if setup.zero == 3:
        yield "parameters stay gathered from a stage's first backward pass to the end of the step"
