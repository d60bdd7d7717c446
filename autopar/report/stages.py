"""The stages of a plan as a table, and whether this machine can run the plan."""

from __future__ import annotations

from autopar.costmodel.cluster.local_gpus import local_gpus
from autopar.costmodel.cluster.local_memory import local_memory
from autopar.plan import Plan
from autopar.plan_parts import StagePlan
from autopar.units import bytes_text, seconds_text

from .tables import Table


def stages_table(plan: Plan) -> Table:
    """The cuts of the model, and the seconds and messages of the stages.

    The sums of the slowest device are those in the summary.
    """
    chunked = plan.schedule.interleave > 1
    stages = len(plan.stages) // plan.schedule.interleave
    rows = [_row(number, number % stages, stage, plan) for number, stage in enumerate(plan.stages)]
    columns: tuple[str, ...] = (
        ">stage",
        ">on devices of",
        "begins with",
        "mesh",
        ">compute",
        ">communication",
        ">memory",
        "hands on",
    )
    if not chunked:
        rows = [(row[0], *row[2:]) for row in rows]
        columns = (columns[0], *columns[2:])
    title = "Stages: seconds of a step, bytes at the peak of a device"
    if plan.provenance.inside:
        title += f" (cuts inside layers would save {plan.provenance.inside:.1%} of it at most)"
    return Table(title=title, columns=columns, rows=tuple(rows))


def _row(number: int, device: int, stage: StagePlan, plan: Plan) -> tuple[str, ...]:
    count = plan.schedule.micro_batches
    mesh = " x ".join(f"{axis.name}={axis.size}" for axis in stage.mesh) or "1"
    handed = (
        f"{count} x {bytes_text(stage.handed)}, each {seconds_text(stage.send)}"
        if stage.handed
        else "-"
    )
    compute = count * (stage.forward + stage.backward) - stage.moved
    communication = seconds_text(stage.moved + stage.once) if stage.moved + stage.once else "-"
    return (
        str(number),
        str(device),
        stage.first,
        mesh,
        seconds_text(compute),
        communication,
        bytes_text(stage.memory),
        handed,
    )


def where_line(plan: Plan) -> str:
    """A line that says whether this machine can run the plan, or try it without GPUs."""
    gpus = len(local_gpus())
    if gpus >= plan.devices:
        return f"this machine can run it: its {gpus} GPUs are enough for {plan.devices} ranks"
    needed = plan.devices * plan.predicted.memory
    held = local_memory()
    have = f"{gpus} GPUs are too few" if gpus else "no GPUs are here"
    of_ranks = (
        "1 rank on the CPU needs"
        if plan.devices == 1
        else (f"{plan.devices} ranks on the CPU need")
    )
    ranks = f"{of_ranks} {bytes_text(needed)}"
    if held is None:
        return f"this machine does not tell its memory: {have}; {ranks}"
    ranks += f", and there are {bytes_text(held)}"
    return f"this machine {'can only try' if needed <= held else 'cannot run'} it: {have}; {ranks}"
