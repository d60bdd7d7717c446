"""The plan found beside the best plans of known schemes, as tables and as one object."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from autopar.analysis.searches.rivals import Rival, rival_of
from autopar.api import Planned
from autopar.plan import Plan
from autopar.report.certainty import certainty_json, certainty_lines
from autopar.report.printing import Table
from autopar.report.tables import scheme_line, summary_lines
from autopar.schemes import SCHEMES, scheme_named, scheme_of
from autopar.sharding.analysis import analyse
from autopar.units import bytes_text, seconds_text


def comparison_table(plan: Plan, named: str, rivals: Sequence[Rival]) -> Table:
    """The plan found next to the known schemes."""
    rows = tuple(
        _rival_row(rival, plan.predicted.step) for rival in (rival_of("", plan, named), *rivals)
    )
    columns = ("scheme", "mesh", ">step", ">ratio", ">communication", ">memory", "")
    return Table(title="Beside known schemes", columns=columns, rows=rows)


def _rival_row(rival: Rival, best: float) -> tuple[str, ...]:
    if rival.step is None:
        return (
            rival.name,
            "",
            "",
            "",
            "",
            "",
            "takes long: autopar compare prices it" if rival.late else f"impossible: {rival.why}",
        )
    remarks = [] if rival.fits else ["does not fit"]
    if rival.named != rival.scheme:
        remarks.append(f"is {rival.named}")
    if rival.host_memory:
        remarks.append(f"and {bytes_text(rival.host_memory)} in host memory")
    ratio = f"{rival.step / best:.2f}x"
    figures = (
        seconds_text(rival.step),
        ratio,
        seconds_text(rival.communication),
        bytes_text(rival.memory),
    )
    return (rival.name, rival.mesh, *figures, ", ".join(remarks))


def compared_parts(
    planned: Planned, rivals: Sequence[Rival], sentence: str, *, named: bool = False
) -> list[str | Table]:
    """The output of `autopar compare`.

    Impossible schemes share a line unless the user `named` them.
    """
    absent = [] if named else [rival for rival in rivals if rival.step is None]
    rivals = [rival for rival in rivals if rival not in absent]
    analysis = analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    called = scheme_of(planned.plan, analysis)
    return [
        *summary_lines(planned.plan, sentence),
        *certainty_lines(planned.plan, planned.cluster),
        scheme_line(called),
        comparison_table(planned.plan, called.called, rivals),
        *([_absent_line(absent)] if absent else []),
    ]


def _absent_line(absent: Sequence[Rival]) -> str:
    """A line with the schemes that are impossible here, each with its reason."""
    return "\nimpossible here: " + "; ".join(f"{rival.name} ({rival.why})" for rival in absent)


def compared_json(planned: Planned, rivals: Sequence[Rival]) -> dict[str, Any]:
    """The comparison as one object: seconds and bytes; `ratio`: to the step of the plan found."""
    analysis = analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    named = scheme_of(planned.plan, analysis)
    best = planned.plan.predicted.step
    rows = (rival_of("", planned.plan, named.called), *rivals)
    return {
        "cluster": planned.cluster.name,
        "devices": planned.cluster.devices,
        "model": planned.plan.model.name,
        "scheme": named.scheme,
        **certainty_json(planned.plan, planned.cluster),
        "rows": [
            dataclasses.asdict(r)
            | {"scheme": r.name, "ratio": None if r.step is None else r.step / best}
            for r in rows
        ],
        "words": {r.scheme: scheme_named(r.scheme).words for r in rivals if r.scheme in SCHEMES},
    }
