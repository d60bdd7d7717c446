"""A configuration of another project as a plan, in sentences and tables and as an object."""

from __future__ import annotations

from typing import Any

from autopar.analysis.searches.rivals import rival_of
from autopar.costmodel import Cluster
from autopar.costmodel.calibration.intervals import chance_to_fit
from autopar.costmodel.known import Priced
from autopar.integrations.importing import Imported
from autopar.schemes import scheme_of
from autopar.sharding.analysis import analyse
from autopar.units import bytes_text, seconds_text

from .certainty import certainty_lines, chance_text
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
    if imported.run is not None:
        parts.append(_run_sentence(imported.run, planned.cluster))
    if planned.plan.stages:
        parts.append(stages_table(planned.plan))
    if imported.free is not None:
        best = scheme_of(imported.free.plan, analysis).called
        row = rival_of("configuration", planned.plan, named.called, fits=imported.fits)
        parts.append(comparison_table(imported.free.plan, best, [row], planned.cluster))
    return [*parts, saved_line(saved)]


def _run_sentence(run: Priced, cluster: Cluster) -> str:
    """The price of the run itself, beside that of the plan for it."""
    fits = chance_text(_chance(run, cluster))
    return (
        f"the run itself, by Megatron-Core: {seconds_text(run.step)} a step, "
        f"{bytes_text(run.memory)} of a device, which {fits}"
    )


def _chance(run: Priced, cluster: Cluster) -> float:
    """The chance that a run fits, whose bytes are with allocator, context and libraries."""
    room = min(pool.device.memory_capacity for pool in cluster.pools)
    return chance_to_fit(run.memory, room)


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
        "run": None
        if imported.run is None
        else {
            "step": imported.run.step,
            "memory": imported.run.memory,
            "fits": imported.run.fits,
            "fits_probability": _chance(imported.run, imported.planned.cluster),
        },
        "plan": plan.model_dump(mode="json", by_alias=True),
    }
