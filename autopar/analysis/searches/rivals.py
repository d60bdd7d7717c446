"""The rivals of a plan: the best plan of every known scheme on the same cluster."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autopar.api import Planned
from autopar.errors import NoPlanFits, UsageError
from autopar.options.plan_options import requests_beside
from autopar.options.table import COMPARED
from autopar.plan import Plan
from autopar.planning.model.progress import Progress
from autopar.planning.model.request import WITHOUT_LIMIT, Request
from autopar.planning.planner import fastest_plan
from autopar.planning.remembered_plans import Searches
from autopar.schemes import scheme_of, stages_of
from autopar.schemes.recipes import ALONE
from autopar.sharding.analysis import Analysis

from .side_by_side import side_by_side

SHORT = ("data", "megatron")
"""The schemes compared with every plan; `autopar compare` prices all schemes."""
LONG = 10.0
SHARE = 0.2
"""The least CPU seconds of a search that is compared by default, and the share of them for each
scheme.
"""
MAX_OPERATORS = 4000
"""The most operators of a model that is compared by default: each scheme is a search of its own."""


class _TooLong(Exception):
    """A scheme takes more time than allowed."""


def rivals(
    planned: Planned,
    schemes: Sequence[str],
    *,
    memory: float | None,
    given: Mapping[str, Any] | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> list[Rival]:
    """The best plan of each scheme on the devices of the plan, or the reason why there is none.

    `given`: options of `autopar.plan`, of which those of `COMPARED` hold here, too. `seconds`: CPU
    seconds for each scheme (None: no limit).
    """
    analysis = planned.analysis
    # No scheme's name means host memory: what does not fit says so.
    pins: dict[str, Any] = {"memory": memory, "offload": "none"}
    pins |= {name: value for name, value in (given or {}).items() if name in COMPARED}

    def requests(**asked: Any) -> list[Request]:
        made = requests_beside(planned.plan, analysis.graph, planned.cluster, **pins, **asked)
        # The rows say what schemes take, and not how near to their best that is.
        return [replace(request, certified=False) for request in made]

    searches = Searches(analysis.graph, requests()[0], folded=planned.folded)
    # Made once, for all processes.
    _ = searches.folded

    def rival(name: str) -> Rival:
        try:
            return _rival(name, analysis, requests(scheme=name), searches, _alarm(seconds))
        except UsageError as error:
            return Rival(scheme=name, why=str(error).removeprefix(f"{name}: "))
        except _TooLong:
            return Rival(scheme=name, late=True)

    compared = []
    if progress:
        progress(0, len(schemes), "schemes")
    for row in side_by_side(rival, schemes):
        compared.append(row)
        if progress:
            progress(len(compared), len(schemes), row.scheme)
    return compared


def _alarm(seconds: float | None) -> Progress:
    """A progress callback that raises `_TooLong` after so many CPU seconds."""
    # Of the processor, so that other programs do not decide which schemes are priced.
    end = math.inf if seconds is None else time.process_time() + seconds

    def look(done: int, of: int, what: str) -> None:
        if time.process_time() > end:
            raise _TooLong

    return look


def _rival(
    name: str, analysis: Analysis, requests: Sequence[Request], searches: Searches, alarm: Progress
) -> Rival:
    """The best plan of a scheme; if none fits the memory, one without a limit.

    The excess of memory is then shown.
    """
    search = partial(searches.plan, progress=alarm)
    # Where nothing fits, a search looks for what would do, which takes long and is not shown here.
    for fits in (False,) if all(map(searches.surely_misfits, requests)) else (True, False):
        if not fits:
            requests = [replace(request, memory=WITHOUT_LIMIT) for request in requests]
        with contextlib.suppress(NoPlanFits):
            plan = fastest_plan(requests, search)
            return rival_of(name, plan, scheme_of(plan, analysis).called, fits=fits)
    return Rival(scheme=name, why="no plan fits")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """The best plan of a known scheme, or the plan found if `scheme` is empty.

    `fits`: whether it fits the memory. `host_memory`: bytes of optimizer state in host memory.
    `why`: the reason if there is no such plan. `late`: it was not priced, because that takes long.
    """

    scheme: str
    mesh: str = ""
    named: str = ""
    step: float | None = None
    communication: float = 0.0
    memory: float = 0.0
    fits: bool = False
    host_memory: float = 0.0
    why: str = ""
    late: bool = False

    @property
    def name(self) -> str:
        """The name of the row."""
        return self.scheme or "plan found"

    @property
    def recipe(self) -> str:
        """The name of the scheme that people use, if it has one."""
        return ALONE.get(self.scheme, "")

    @property
    def label(self) -> str:
        """The name of the row with the one that people use."""
        return f"{self.recipe} ({self.name})" if self.recipe else self.name


def rival_of(scheme: str, plan: Plan, named: str, *, fits: bool = True) -> Rival:
    """The row of a plan."""
    stages = f"{stages_of(plan)} stages of " if plan.stages else ""
    predicted = plan.predicted
    return Rival(
        scheme=scheme,
        mesh=f"{stages}{plan.mesh_}",
        named=named,
        step=predicted.step,
        communication=predicted.communication,
        memory=predicted.memory,
        fits=fits,
        host_memory=predicted.host_memory,
    )
