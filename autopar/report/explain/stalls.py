"""The stalls of a step as sentences, tables and one object: reasons, stages, largest waits."""

from __future__ import annotations

import dataclasses
from typing import Any

from autopar.analysis.program.stalls import Stall, Stalls
from autopar.analysis.program.strategy_words import COLLECTIVES
from autopar.costmodel.step.reasons import Reason
from autopar.plan import Plan
from autopar.report.tables import Table
from autopar.units import seconds_text

LISTED = 12
"""The number of waits in the table."""
SEEN = 1e-6
"""The share of a step below which a reason, or a wait, is not listed."""
MEANINGS = {
    Reason.GATHERS: "an operator needs parameters that are not whole yet; a larger batch on each "
    "device, or parameters that are split less (--zero, --mesh) or gathered less often "
    "(--micro-batches)",
    Reason.REDUCTIONS: "gradients are still being summed when their next sum is to begin; fewer "
    "micro-batches, or --zero 1, which sums them once a step",
    Reason.VALUES: "an operator needs values that are being sent, and nothing else is to be "
    "computed; other strategies (OP --alternatives tells their cost), or a mesh with such axes "
    "within fast links",
    Reason.BUBBLE: "a stage has no micro-batch to work on, or other stages end later; more "
    "micro-batches, fewer stages, or another --schedule",
    Reason.MESSAGES: "a micro-batch is still on its way from another stage; fewer stages, or "
    "larger micro-batches",
    Reason.SLOWED: "computation and hidden transfers share a device; only fewer bytes help: a "
    "larger batch on each device, or parameters that are split less (--zero)",
    Reason.END: "the last gradients are summed when nothing is left to compute; a larger batch "
    "makes it a smaller share, copies of the model on nearer devices make it shorter (--mesh)",
    Reason.UPDATE: "the optimizer works when no pass does; --zero 1 and above split its work, "
    "--offload none keeps its state on the device",
}
"""What each reason means, and what a user can try."""


def stalls_parts(plan: Plan, stalls: Stalls) -> list[str | Table]:
    """Sentences and tables, in the order of printing."""
    rest = stalls.step - stalls.computation
    parts: list[str | Table] = [
        f"A step takes {seconds_text(stalls.step)}: {seconds_text(stalls.computation)} of "
        f"computation in its passes, and {seconds_text(rest)} besides, {_share(rest, stalls)} of "
        "it.",
        *_notes(plan, stalls),
        _reasons_table(stalls),
    ]
    if stalls.stages:
        parts.append(_stages_table(stalls))
    return [*parts, _waits_table(stalls)]


def stalls_json(stalls: Stalls) -> dict[str, Any]:
    """The answer as one object, in seconds."""
    return {
        "step": stalls.step,
        "computation": stalls.computation,
        "reasons": {reason.value: seconds for reason, seconds in stalls.reasons.items()},
        "waits": [
            {**dataclasses.asdict(wait), "reason": wait.reason.value} for wait in stalls.waits
        ],
        **({"stages": [stalls_json(stage) for stage in stalls.stages]} if stalls.stages else {}),
    }


def _notes(plan: Plan, stalls: Stalls) -> list[str]:
    """Sentences about what the figures leave open."""
    notes = []
    if stalls.stages:
        notes.append(
            "Stages are simulated pass by pass: what is sent inside a pass counts in full, which "
            "kinds and axes it has is not told apart, and rows are means of all stages."
        )
    if abs(stalls.step - plan.predicted.step) > SEEN * stalls.step:
        notes.append(f"The plan's own step is {seconds_text(plan.predicted.step)}.")
    return notes


def _share(seconds: float, stalls: Stalls) -> str:
    return f"{seconds / stalls.step:.1%}" if stalls.step else ""


def _is_seen(seconds: float, stalls: Stalls) -> bool:
    return abs(seconds) > SEEN * stalls.step


def _reasons_table(stalls: Stalls) -> Table:
    """The reasons with their seconds, the largest first."""
    rows = [
        (reason.value, seconds_text(seconds), _share(seconds, stalls), MEANINGS[reason])
        for reason, seconds in sorted(stalls.reasons.items(), key=lambda pair: -pair[1])
        if _is_seen(seconds, stalls)
    ]
    rest = stalls.step - stalls.computation
    rows.append(("together", seconds_text(rest), _share(rest, stalls), ""))
    return Table(
        title="What makes the step longer than the computation of its passes",
        columns=("reason", ">seconds", ">share", "meaning, and what to try"),
        rows=tuple(rows),
    )


def _stages_table(stalls: Stalls) -> Table:
    """The seconds of each stage by reason."""
    seen = [
        reason
        for reason in Reason
        if any(_is_seen(stage.reasons[reason], stage) for stage in stalls.stages)
    ]
    rows = [
        (
            str(number),
            seconds_text(stage.computation),
            *(seconds_text(stage.reasons[reason]) for reason in seen),
        )
        for number, stage in enumerate(stalls.stages)
    ]
    columns = (">stage", ">computation", *(f">{reason.value}" for reason in seen))
    return Table(title="The same, stage by stage", columns=columns, rows=tuple(rows))


def _waits_table(stalls: Stalls) -> Table:
    """The largest waits; of what transfers are due to others, in a column of their own."""
    listed = [one for one in stalls.waits if _is_seen(one.seconds, stalls)][:LISTED]
    return Table(
        title="The largest waits; late: due to other transfers on the same stream or link",
        columns=("for", "collective", "phase", "reason", *_FIGURES),
        rows=tuple(_wait_row(one, stalls) for one in listed),
    )


_FIGURES = (">waits", ">seconds", ">late", ">share")


def _wait_row(wait: Stall, stalls: Stalls) -> tuple[str, ...]:
    return (
        wait.name,
        f"{COLLECTIVES.get(wait.kind, wait.kind)} over {wait.axes}" if wait.kind else "-",
        wait.phase or "both",
        wait.reason.value,
        str(wait.times),
        seconds_text(wait.seconds),
        seconds_text(wait.late) if _is_seen(wait.late, stalls) else "-",
        _share(wait.seconds, stalls),
    )
