"""Adds to an explanation what further searches answer: alternatives, pins and flips."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar.analysis.searches.alternatives import Why
from autopar.analysis.searches.outer_choices import outer_alternatives
from autopar.analysis.searches.sensitivity import sensitivity_of
from autopar.costmodel import Cluster
from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.planning.model.progress import Progress

if TYPE_CHECKING:
    from .explanation import Explained


@dataclass(frozen=True, slots=True, kw_only=True)
class Further:
    """The answers that need further searches.

    `alternatives`: whether they are wanted. `batches`: gives the model for other batches; None
    leaves out the sensitivity. `memory`: the limit.
    """

    alternatives: bool
    batches: Callable[[int], Graph] | None = None
    memory: float | None = None


def answered(
    explained: Explained, cluster: Cluster, further: Further, progress: Progress
) -> Explained:
    """The explanation with the plan's alternatives and its sensitivity."""
    assert explained.analysis is not None
    plan = explained.plan
    analysis = explained.analysis
    memory = further.memory
    if further.alternatives and explained.names is None:
        pinned = outer_alternatives(plan, analysis, cluster, memory=memory, progress=progress)
        explained = dataclasses.replace(explained, pinned=tuple(pinned))
    elif further.alternatives and not explained.parameter:
        if explained.names is None or len(explained.names) != 1:
            raise UsageError(
                f"--alternatives needs one operator, or none; OP names {len(explained.names or ())}"
            )
        why = Why(plan, analysis, cluster, memory=memory)
        explained = dataclasses.replace(
            explained,
            others=tuple(why.alternatives(explained.names[0], progress)),
            step=plan.predicted.step,
        )
    if further.batches is not None:
        sensitivity = sensitivity_of(
            plan, analysis, cluster, memory=memory, batches=further.batches
        )
        explained = dataclasses.replace(
            explained, flips=tuple(sensitivity.flips(progress)), base=sensitivity.base
        )
    return explained
