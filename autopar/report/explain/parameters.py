"""The reasons for a parameter's storage: its traffic, and the cost of other layouts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.analysis.program.account import Account
from autopar.analysis.program.strategy_words import zero_words
from autopar.analysis.searches.alternatives import Alternative, Why
from autopar.costmodel import Cluster
from autopar.plan import Plan
from autopar.sharding.analysis import Analysis
from autopar.sharding.layout import Kind, local_shape, parse_layout
from autopar.units import bytes_text, seconds_text

from .operators import bare_chains, layout_words, stored_words

EQUAL = 1e-4
"""The largest difference between two storages of equal speed, as a share of the step."""


def storages_of(
    plan: Plan, analysis: Analysis, cluster: Cluster, name: str, memory: float | None = None
) -> tuple[Alternative, ...]:
    """The best plans with every possible storage layout of the parameter."""
    return tuple(Why(plan, analysis, cluster, memory=memory).storages(name))


def parameter_lines(
    plan: Plan, name: str, account: Account | None, storages: Sequence[Alternative], parameters: int
) -> list[str]:
    """Everything about one parameter, as text.

    `parameters`: the number of the plan's parameters.
    """
    held = plan.parameters[name]
    axes = [axis.name for axis in plan.mesh]
    layout = parse_layout(held.storage)
    local = local_shape(layout, held.shape, plan.mesh_.shape)
    lines = [
        f"{name} (one of {parameters} parameters) {held.dtype} {' x '.join(map(str, held.shape))}"
    ]
    each = f", per device {' x '.join(map(str, local))}" if local != held.shape else ""
    lines.append(f"  stored as {stored_words(held)} ({layout_words(layout, axes)}){each}")
    lines += bare_chains(plan, name)
    if account is not None:
        if any(placement.kind is Kind.SPLIT for placement in layout):
            lines.append(
                f"  parameters that are stored split and used whole have {zero_words(account)}"
            )
        units = [
            (number, unit) for number, unit in enumerate(account.units) if name in unit.parameters
        ]
        lines += [_unit_text(number, unit.parameters, unit.collectives) for number, unit in units]
        lines += _owner_lines(name, account)
    return [*lines, *_reasons(storages, plan)]


def _owner_lines(name: str, account: Account) -> list[str]:
    """The owners of a parameter's matrices, which compute their updates."""
    for owners in account.owners:
        for owned in (o for exchange in owners.exchanges for o in exchange.members):
            if owned.name == name:
                ranks = ", ".join(str(place) for place in sorted(set(owned.places)))
                axes = account.over(owned.shared)
                where = f" by number {ranks} of the devices over {axes}" if axes else ""
                return [f"  updated as a whole matrix{where}"]
    return []


def _unit_text(
    number: int, members: Sequence[str], collectives: Sequence[tuple[Any, float]]
) -> str:
    """The collectives of a unit of parameters in one step, as text."""
    nbytes = sum(c.nbytes for c, _ in collectives)
    seconds = math.fsum(spent for _, spent in collectives)
    return (
        f"  travels in unit {number} of {len(members)} parameters: {bytes_text(nbytes)} in "
        f"{seconds_text(seconds)} of collectives a step"
    )


def _reasons(storages: Sequence[Alternative], plan: Plan) -> list[str]:
    """The reason for the storage, from a comparison with the best of the other layouts."""
    others = [other for other in storages if not other.planned and other.step is not None]
    if not others:
        return ["  no other storage was possible"] if storages else []
    best = min(others, key=lambda other: other.step or math.inf)
    assert best.step is not None
    words = ", ".join(f"{word} over {axis}" for axis, word in best.words.items())
    change = best.step / plan.predicted.step - 1
    if abs(change) < EQUAL:
        return [
            f"  why: the next best, {words}, is as fast ({change:+.3%} of a step): the search adds "
            "it up as no cheaper"
        ]
    if change > 0:
        return [f"  why: the next best, {words}, makes a step {change:.2%} longer"]
    return [
        f"  {words} would make a step {-change:.2%} shorter: more than the search could tell from "
        "its tables"
    ]
