"""The rivals of a plan: the best plan of every known scheme on the same cluster."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..api import Planned
from ..errors import NoPlanFits, UsageError
from ..planning.folded_model import FoldedModel
from ..planning.planner import folded_of, search_plan
from ..planning.ranking import Progress
from ..planning.request import Request
from ..schemes import SCHEMES, scheme_named, scheme_of
from ..schemes.pinning import pinned
from ..sharding.analysis import Analysis, analyse
from .certainty import certainty_json, certainty_lines
from .tables import Rival, Table, comparison_table, rival_of, scheme_line, summary_lines

SHORT = ("data", "megatron")
"""The schemes compared with every plan; `autopar compare` prices all schemes."""
LONG, SHARE = 10.0, 0.2
"""The least CPU seconds of a search that is compared by default, and the share of them for each scheme."""
WITHOUT_LIMIT = 1e18
"""More bytes per device than any plan needs."""
MAX_OPERATORS = 4000
"""The most operators of a model that is compared by default: each scheme is a search of its own."""


class _TooLong(Exception):
    """A scheme takes more time than allowed."""


def rivals(
    planned: Planned, schemes: Sequence[str], *, memory: float | None, seconds: float | None = None, progress: Progress | None = None
) -> list[Rival]:
    """The best plan of each scheme on the devices of the plan, or the reason why there is none.

    `seconds`: CPU seconds for each scheme (None: no limit).
    """
    analysis = analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    free = Request(
        cluster=planned.cluster, train=analysis.train, optimizer=planned.plan.model.optimizer, memory=memory, uniform=True,
        types=planned.plan.schedule.types,
    )  # fmt: skip
    folded = folded_of(analysis.graph, free)
    found = []
    for number, name in enumerate(schemes):
        if progress:
            progress(number, len(schemes), name)
        try:
            found.append(_rival(name, analysis, free, folded, _alarm(seconds)))
        except _TooLong:
            found.append(Rival(scheme=name, late=True))
    return found


def _alarm(seconds: float | None) -> Progress:
    """A progress callback that raises `_TooLong` after so many CPU seconds."""
    end = math.inf if seconds is None else time.process_time() + seconds

    def look(done: int, of: int, what: str) -> None:
        if time.process_time() > end:
            raise _TooLong

    return look


def _rival(name: str, analysis: Analysis, free: Request, folded: FoldedModel, alarm: Progress) -> Rival:
    """The best plan of a scheme; if none fits the memory, one without a limit, to show the excess."""
    try:
        request = pinned(free, scheme_named(name), analysis)
    except UsageError as error:
        return Rival(scheme=name, why=str(error).removeprefix(f"{name}: "))
    for fits in (True, False):
        limited = request if fits else replace(request, memory=WITHOUT_LIMIT)
        try:
            plan = search_plan(analysis.graph, limited, progress=alarm, folded=folded)
        except NoPlanFits:
            continue
        except UsageError as error:
            return Rival(scheme=name, why=str(error))
        return rival_of(name, plan, scheme_of(plan, analysis).called, fits=fits)
    return Rival(scheme=name, why="no plan fits")


def compared_parts(planned: Planned, found: Sequence[Rival], sentence: str, *, named: bool = False) -> list[str | Table]:
    """The output of `autopar compare`; impossible schemes share a line unless the user `named` them."""
    absent = [] if named else [rival for rival in found if rival.step is None]
    found = [rival for rival in found if rival not in absent]
    analysis = analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    called = scheme_of(planned.plan, analysis)
    return [
        *summary_lines(planned.plan, sentence),
        *certainty_lines(planned.plan, planned.cluster),
        scheme_line(called),
        comparison_table(planned.plan, called.called, found),
        *([_absent_line(absent)] if absent else []),
    ]


def _absent_line(absent: Sequence[Rival]) -> str:
    """A line with the schemes that are impossible for the model or the devices, each with its reason."""
    return "\nimpossible here: " + "; ".join(f"{rival.name} ({rival.why})" for rival in absent)


def compared_json(planned: Planned, found: Sequence[Rival]) -> dict[str, Any]:
    """The comparison as one object: seconds and bytes; `ratio`: to the step of the plan found."""
    analysis = analyse(planned.model.graph, train=planned.plan.model.mode == "train")
    named = scheme_of(planned.plan, analysis)
    best = planned.plan.predicted.step
    rows = (rival_of("", planned.plan, named.called), *found)
    return {
        "cluster": planned.cluster.name,
        "devices": planned.cluster.devices,
        "model": planned.plan.model.name,
        "scheme": named.scheme,
        **certainty_json(planned.plan, planned.cluster),
        "rows": [dataclasses.asdict(r) | {"scheme": r.name, "ratio": None if r.step is None else r.step / best} for r in rows],
        "words": {r.scheme: scheme_named(r.scheme).words for r in found if r.scheme in SCHEMES},
    }
