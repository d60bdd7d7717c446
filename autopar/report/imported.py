"""A configuration of another project as a plan, in sentences and tables and as an object."""

from __future__ import annotations

from typing import Any

from autopar.analysis.searches.rivals import rival_of
from autopar.integrations.importing import Imported
from autopar.integrations.importing.changes import changes
from autopar.plan import Plan
from autopar.printable import printable
from autopar.schemes import scheme_of
from autopar.sharding.analysis import analyse
from autopar.units import seconds_text

from .certainty import certainty_lines
from .comparison import comparison_table
from .plan_output import cluster_sentence, saved_line
from .printing import Table
from .stages import stages_table
from .tables import summary_lines

SHOWN = 20
"""Settings that are shown of those that change."""


def imported_parts(imported: Imported, saved: str | None) -> list[str | Table]:
    """Sentences and tables, in the order of printing; `saved`: the file of the plan."""
    planned = imported.planned
    analysis = analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    named = scheme_of(planned.plan, analysis)
    parts: list[str | Table] = [
        f"{imported.configuration.source} as {imported.scheme}",
        *summary_lines(planned.plan, cluster_sentence(planned), named, planned.cluster),
        *certainty_lines(planned.plan, planned.cluster),
    ]
    if not imported.fits:
        parts.append(
            "this does not fit the memory of a device: the figures are those without a limit"
        )
    if planned.plan.stages:
        parts.append(stages_table(planned.plan))
    if imported.free is not None:
        best = scheme_of(imported.free.plan, analysis).called
        row = rival_of("configuration", planned.plan, named.called, fits=imported.fits)
        parts.append(comparison_table(imported.free.plan, best, [row], planned.cluster))
        parts += _changed_lines(planned.plan, imported.free.plan)
    return [*parts, saved_line(saved)]


def _changed_lines(run: Plan, better: Plan) -> list[str]:
    """The step of the plan found beside that of the run, and the settings that lead to it."""
    if run.predicted.step <= better.predicted.step:
        return [f"no faster plan was found for {run.target}"]
    share = better.predicted.step / run.predicted.step - 1
    said = (
        f"found for {run.target}: {seconds_text(better.predicted.step)} a step for "
        f"{seconds_text(run.predicted.step)} ({share:+.1%})"
    )
    changed = changes(run, better, run.target)
    if not changed:
        return [said]
    lines = [f"  {name}: {_value(old)} -> {_value(new)}" for name, (old, new) in changed.items()]
    more = [f"  and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return [f"{said}; in its file change", *(printable(line) for line in lines[:SHOWN]), *more]


def _value(text: str | None) -> str:
    """A setting's value in words; a flag has none."""
    return "not set" if text is None else text or "set"


def imported_json(imported: Imported) -> dict[str, Any]:
    """The plan and its figures beside those of the best plan: seconds and bytes."""
    plan = imported.planned.plan
    best: dict[str, Any] | None = None
    if imported.free is not None:
        better = imported.free.plan
        changed = changes(plan, better, plan.target)
        best = {
            "step": better.predicted.step,
            "memory": better.predicted.memory,
            "changes": {name: list(values) for name, values in changed.items()},
        }
    return {
        "source": imported.configuration.source,
        "lost": list(imported.configuration.lost),
        "scheme": imported.scheme,
        "fits": imported.fits,
        "step": plan.predicted.step,
        "memory": plan.predicted.memory,
        "best": best,
        "plan": plan.model_dump(mode="json", by_alias=True),
    }
