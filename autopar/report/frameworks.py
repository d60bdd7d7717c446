"""The framework whose habits are priced: a plan's own, and another that is asked about."""

from __future__ import annotations

from autopar.analysis.program.account import has_account
from autopar.analysis.program.step_parts import stepping_of
from autopar.costmodel import Cluster
from autopar.costmodel.frameworks import OWN
from autopar.errors import UsageError
from autopar.integrations.convert.words import layout_in_words
from autopar.plan import Plan
from autopar.sharding.analysis import Analysis
from autopar.units import seconds_text


def target_lines(plan: Plan) -> list[str]:
    """The project that runs the plan, what it calls the layout, and whose habits are priced."""
    if plan.framework == OWN:
        return [f"target {plan.target}: priced by the habits of {OWN}'s own runtime"]
    try:
        layout = layout_in_words(plan, plan.target)
    except UsageError:
        # Stages of unlike meshes have no common degrees.
        layout = ""
    return [
        f"target {plan.target}: priced by the habits of {plan.framework}; {OWN}'s own runtime "
        "takes other times (--target autopar)",
        *([f"in its words {layout}"] if layout else []),
    ]


def repriced(plan: Plan, analysis: Analysis | None, cluster: Cluster | None) -> float | None:
    """Seconds of the plan's step as the cluster's framework would run it.

    None if that is the plan's own, if the model is not there, or if stages are on different meshes.
    """
    if analysis is None or cluster is None or cluster.framework.name == plan.framework:
        return None
    return stepping_of(plan, analysis).seconds(cluster) if has_account(plan) else None


def repriced_lines(plan: Plan, step: float | None, cluster: Cluster | None) -> list[str]:
    """A line with such a step beside the predicted one, if there is one."""
    if step is None or cluster is None:
        return []
    return [
        f"as {cluster.framework.name} would run this plan: step {seconds_text(step)}, "
        f"{step / plan.predicted.step:.2f} of what is predicted"
    ]
