"""A configuration of another project as a plan, in sentences and tables and as an object."""

from __future__ import annotations

from typing import Any

from autopar.analysis.searches.rivals import rival_of
from autopar.integrations.importing import Imported
from autopar.schemes import scheme_of
from autopar.sharding.analysis import analyse

from .certainty import certainty_lines
from .comparison import comparison_table
from .plan_output import cluster_sentence, saved_line
from .printing import Table
from .stages import stages_table
from .tables import summary_lines


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
    return [*parts, saved_line(saved)]


def imported_json(imported: Imported) -> dict[str, Any]:
    """The plan and its figures beside those of the best plan: seconds and bytes."""
    plan = imported.planned.plan
    best = None
    if imported.free is not None:
        predicted = imported.free.plan.predicted
        best = {"step": predicted.step, "memory": predicted.memory}
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
