"""Searches for plans, remembered on disk: the same search again is a file that is read.

A plan depends on the graph, the rules of its operators, the request, the limits of the search's
work and the code of all rooms that planning uses. That is the key; where a part of it has no text
(a restriction that is a user's function), nothing is remembered. A search that was interrupted, or
that a clock may end, is not remembered either.
"""

from __future__ import annotations

import functools
import json

from pydantic import BaseModel, ConfigDict, ValidationError

from autopar.errors import NoPlanFits, PlanError
from autopar.ir import Graph
from autopar.ir.value_texts import value_text
from autopar.plan import Plan
from autopar.plan_checks import require_consistent
from autopar.remembered import folder_of_answers, key_of, recalled, remember, source_of
from autopar.sharding.rules import added_rules

from .model.effort import EFFORT
from .model.folded_model import FoldedModel
from .model.progress import Progress
from .model.request import Request
from .outer_search import surely_misfits
from .planner import folded_of, search_plan

_PACKAGES = ("autopar", "numpy")
_ROOMS = (
    *("ir", "sharding", "order", "compiled", "costmodel", "search", "planning", "schemes"),
    *("options/targets.py", "options/plan_options.py", "integrations/convert"),
    *("plan.py", "plan_parts.py"),
)
"""The code of this package that decides what a plan is."""


class Searches:
    """Searches of one graph under several requests, which share its folding and analyses.

    `folded`: the graph as other searches saw it, which serves these if its layers are folded alike.
    `recalled`: the number of plans that were remembered; `made`: of those that were searched.
    """

    def __init__(self, graph: Graph, first: Request, *, folded: FoldedModel | None = None) -> None:
        self.graph = graph
        self.recalled = 0
        self.made = 0
        self._first = first
        self._others = folded

    @functools.cached_property
    def folded(self) -> FoldedModel:
        """The graph as the searches see it, made when it is first needed."""
        first = self._first
        others = self._others
        if others is not None and others.serves(self.graph, first.train, folded=first.folds):
            return others
        return folded_of(self.graph, first)

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for the user where nothing was searched."""
        if self.made or not self.recalled:
            return ()
        return ("the search was made before, and its plan is remembered: --no-cache searches anew",)

    def plan(self, request: Request, progress: Progress | None = None) -> Plan:
        """The plan of `search_plan`; raises what that raises."""
        key = self._key(request)
        if key is not None and (text := recalled(key)) is not None:
            known = _plan_of(text, self.graph, request)
            if known is not None:
                self.recalled += 1
                return known
        self.made += 1
        try:
            plan = search_plan(self.graph, request, progress=progress, folded=self.folded)
        except NoPlanFits as error:
            if key is not None:
                figures = {"minimum": error.minimum, "memory_limit": error.memory_limit}
                remember(key, json.dumps({"message": str(error), **figures}))
            raise
        if key is not None and plan.provenance.complete:
            remember(key, plan.to_json())
        return plan

    def surely_misfits(self, request: Request) -> bool:
        """Whether it is certain, without a search, that no plan of a request fits the memory."""
        # What is remembered is told faster.
        if (key := self._key(request)) is not None and recalled(key) is not None:
            return False
        return surely_misfits(self.folded, request)

    @functools.cached_property
    def _subject(self) -> str | None:
        graph = self.graph
        try:
            return value_text(
                (
                    *(graph.name, tuple(graph.tensors.values()), graph.operators),
                    *(graph.inputs, graph.outputs, graph.constants),
                    *(graph.loss, graph.replicated, tuple(graph.updates.items())),
                    added_rules(graph),
                )
            )
        except ValueError:
            return None

    def _key(self, request: Request) -> str | None:
        if folder_of_answers() is None or request.seconds is not None or self._subject is None:
            return None
        try:
            asked = value_text((request, EFFORT))
        except ValueError:
            return None
        return key_of("plan", (self._subject, asked, source_of(*_ROOMS)), _PACKAGES)


class _Misfit(BaseModel):
    """The answer that no plan fits the memory."""

    model_config = ConfigDict(extra="forbid", strict=True)

    message: str
    minimum: float
    memory_limit: float


def _plan_of(text: str, graph: Graph, request: Request) -> Plan | None:
    """The plan in a text, or the remembered `NoPlanFits`; None for every other text."""
    if not text.startswith('{"message"'):
        return _checked(text, graph, request)
    try:
        misfit = _Misfit.model_validate_json(text)
    except ValidationError:
        return None
    raise NoPlanFits(misfit.message, minimum=misfit.minimum, memory_limit=misfit.memory_limit)


def _checked(text: str, graph: Graph, request: Request) -> Plan | None:
    try:
        plan = Plan.model_validate_json(text)
        require_consistent(plan)
        plan.require_match(graph)
    except (ValidationError, PlanError):
        # A file that others have written there is not what is remembered.
        return None
    whole = plan.devices + plan.unused == request.cluster.devices
    return plan if whole and plan.cluster == request.cluster.name else None
