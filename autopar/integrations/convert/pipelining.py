"""PyTorch's `torch.distributed.pipelining`.

Stages are cut at any operator; inside a stage run DDP or FSDP2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from autopar.order.schedules import SCHEDULES, TorchClass, schedule_named
from autopar.printable import printable

from .fsdp2 import units_of
from .pipelined_file import BODY, HEADER
from .reach import REPLICAS, Reach, lacks
from .setup import Converted, Setup
from .splits import cuts, held_twice

TARGET = "pipelining"
CLASSES: Mapping[str, TorchClass] = {
    row.name: row.other_names.torch for row in SCHEDULES.values() if row.other_names.torch
}
"""The class of each schedule, with the same order."""
REACH = (
    Reach(
        axes=REPLICAS,
        zeros=(0, 1),
        near=(2, 3),
        recomputes=("none",),
        stages=(2, 0),
        whole_layers=False,
        schedules=tuple(CLASSES),
        searched=("gpipe", "1f1b"),
        filled=True,
        where={
            "stages": "fsdp2 and dtensor write those",
            "recompute": "a stage is a traced graph without the forward functions of its modules",
        },
    ),
)


def pipelining(setup: Setup) -> Converted:
    """The file: `pipelined(module, example, loss)`, to be called on every rank."""
    if setup.stages == 1:
        setup.refuse(TARGET, *lacks(REACH, setup))
    setup.refuse(
        TARGET, *setup.mixed(), *_lacks(setup), *_schedule_lacks(setup), *held_twice(setup.plan)
    )
    pipeline = setup.plan.schedule.pipeline
    lost = tuple(_lost(setup))
    policy = setup.plan.schedule
    header = HEADER.format(
        model=printable(setup.plan.model.name, lines=False),
        ranks=setup.ranks,
        notes="".join(f"#   {note}\n" for note in lost),
        schedule=CLASSES[pipeline].name,
        stages=setup.stages,
        chunks=policy.interleave,
        micro_batches=policy.micro_batches,
        replicas=setup.degree("data") // setup.shards,
        shards=setup.shards,
        units=units_of(setup.plan),
        reshard=setup.zero == 3,
        splits="\n".join(f"    ({name!r}, {after})," for name, after in cuts(setup.plan)),
        reduce=f"torch.{policy.reduce}" if policy.reduce else "None",
        single=not CLASSES[pipeline].several,
    )
    return Converted(text=header + BODY, lost=lost)


def _lacks(setup: Setup) -> Iterable[str]:
    """Parts of a plan that no stage of the target can do."""
    plan = setup.plan
    yield from lacks(REACH, setup)
    if any(parameter.state == "host" for parameter in plan.parameters.values()):
        yield "optimizer state in host memory"
    if plan.schedule.master:
        yield (
            f"parameters stored in {plan.schedule.master} and used in another type, since values "
            "between stages are of the traced type"
        )
    if plan.schedule.reduce and setup.zero == 0:
        yield (
            f"gradients in {plan.schedule.reduce} of parameters that every device stores whole "
            "(ZeRO 0)"
        )
    if plan.model.onnx:
        yield "a model from an ONNX file, which is no module to trace"


def _schedule_lacks(setup: Setup) -> Iterable[str]:
    """Demands of the schedule's class that the plan does not meet."""
    schedule = setup.plan.schedule
    row = schedule_named(schedule.pipeline)
    if schedule.interleave > 1 and not row.chunks:
        yield f"{schedule.interleave} chunks on each stage under the schedule {row.name}"
    if row.other_names.torch:
        yield row.other_names.torch.refuses(setup.stages, schedule.micro_batches)
    if row.splits and setup.degree("data") > 1:
        yield (
            f"{row.name} with data parallelism, whose weight gradients are made where no reduction "
            "sees them"
        )


def _lost(setup: Setup) -> Iterable[str]:
    yield from setup.lost
    yield from setup.minor()
    yield from setup.of_whole_stages()
