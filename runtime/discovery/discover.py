"""From an example call to a proven rule.

Loops, linearity and gradients are looked for by executing the call, and then proven.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import DiscoveryError, RuleError
from autopar.runtime.proof import Disproved, Sample, decisions, prove
from autopar.sharding.program import Decision
from autopar.sharding.rules import RULES, Entry

from .executed_calls import require_function, seeded, with_values
from .linearity import is_differentiable, linear_sets
from .loops import Loop, find_loops
from .rule_notation import rule_text
from .size_groups import spread

MESHES = ((2,), (3,), (2, 2))
"""The meshes on which a rule is proven."""
UNITS = (6, 4)
"""Sizes are multiples of the first to find loops, of the second to refute accidental ratios."""
_COLUMNS = ("rule", "linear", "products", "differentiable", "saves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """A discovered and proven rule, as an `entry` of the table.

    `strategies`: the number of executed strategies, over all samples and meshes. `notes`:
    properties that could not be proven.
    """

    kind: str
    entry: Entry
    strategies: int
    notes: tuple[str, ...] = ()
    meshes: tuple[tuple[int, ...], ...] = MESHES

    def json(self) -> dict[str, Any]:
        """The discovery as plain values."""
        # In the order of the table's columns, so that the line can be pasted into it.
        columns = {name: getattr(self.entry, name) for name in _COLUMNS}
        return {
            "kind": self.kind,
            **columns,
            "line": self.line,
            "strategies": self.strategies,
            "notes": list(self.notes),
        }

    @property
    def line(self) -> str:
        """The line of Python that registers the rule."""
        parts = [repr(self.kind), repr(self.entry.rule)]
        defaults = Entry(rule="")
        parts += [
            f"{name}={getattr(self.entry, name)!r}"
            for name in _COLUMNS[1:]
            if getattr(self.entry, name) != getattr(defaults, name)
        ]
        return f"autopar.register_rule({', '.join(parts)})"


@contextlib.contextmanager
def on_trial(kind: str, entry: Entry) -> Iterator[None]:
    """Put a rule in the table, in place of the present one, inside the block."""
    before = RULES.pop(kind, None)
    RULES[kind] = entry
    try:
        yield
    finally:
        del RULES[kind]
        if before is not None:
            RULES[kind] = before


def discover(case: Sample) -> Discovery:
    """The sharding rule of the sample's operator.

    Loops that cannot be proven are left out, compounds first; the notes name them. Raises
    `DiscoveryError` if the operator is no function of its inputs.
    """
    case = in_double(case)
    require_function(case)
    # The example itself, whose sizes may be equal by accident, and calls at sizes that are not.
    samples = [case, *(spread(case, unit=unit, seed=unit) for unit in UNITS)]
    notes: list[str] = []
    for loops in _fewer_and_fewer(find_loops(samples[1])):
        addends = frozenset[int]().union(*(loop.addends for loop in loops))
        # A rule may be right though its linearity is not: without it sums are complete beforehand.
        for linear in dict.fromkeys((linear_sets(samples[1], addends), ())):
            try:
                entry = _entry(samples[1], loops, linear)
            except RuleError as error:
                notes.append(f"not in the notation, so left out: {error}")
                break
            try:
                # The proof decides: what was found by trying is a guess until every strategy has
                # been executed.
                count, split = prove_all(case.kind, entry, samples, MESHES)
            except Disproved as error:
                notes.append(
                    f"not proven, so left out: {entry.rule}: {str(error).splitlines()[0][:160]}"
                )
                continue
            untried = sorted(set(factor_names(samples[1], case.kind, entry)) - split)
            if untried:
                names = ", ".join(untried)
                notes.append(f"no size divided, so not executed: a split of {names}")
            return Discovery(kind=case.kind, entry=entry, strategies=count, notes=tuple(notes))
    raise DiscoveryError(f"{case.kind}: no rule could be proven: {'; '.join(notes[-1:])}")


def _fewer_and_fewer(loops: Sequence[Loop]) -> Iterator[list[Loop]]:
    """Ever smaller sets of loops.

    These are all, those without compounds, those without reductions either, and none.
    """
    plain = [loop for loop in loops if not loop.compound]
    choices = [list(loops), plain, [loop for loop in plain if loop.reduction is None], []]
    return (choice for index, choice in enumerate(choices) if choice not in choices[:index])


def _entry(case: Sample, loops: Sequence[Loop], linear: tuple[tuple[int, ...], ...]) -> Entry:
    """The row of the table for some loops.

    A product sums over a loop of several inputs, and not every loop is in all inputs.
    """
    products = any(
        loop.reduction == "sum"
        and sum(cut is not None for cut in loop.inputs) > 1
        and any(None in other.inputs for other in loops)
        for loop in loops
    )
    whole = any(set(members) == set(range(len(case.values))) for members in linear)
    return Entry(
        rule=rule_text(case, loops),
        linear=linear,
        products=("",) if products else (),
        differentiable=is_differentiable(case),
        saves="" if whole else "inputs",
    )


def prove_all(
    kind: str, entry: Entry, samples: Sequence[Sample], meshes: Sequence[tuple[int, ...]]
) -> tuple[int, set[str]]:
    """Prove a rule on samples and meshes.

    Returns the number of executed strategies and the factors that they split. Raises `Disproved`.
    """
    count = 0
    split: set[str] = set()
    with on_trial(kind, entry), seeded():
        for case in samples:
            for mesh in meshes:
                try:
                    for decision in decisions(case, mesh):
                        split |= _split_factors(decision)
                    count += prove(case, mesh)
                except ValueError as error:
                    raise Disproved(f"{case}: {error}") from error
    return count, split


def factor_names(case: Sample, kind: str, entry: Entry) -> Iterator[str]:
    """The factors that some option splits."""
    with on_trial(kind, entry):
        for decision in decisions(case, (1,)):
            yield from _split_factors(decision)


def _split_factors(decision: Decision) -> set[str]:
    """The factors that a decision splits."""
    rule = decision.rule
    assert rule is not None
    return {rule.factors[option.factor].name for option in decision.options if option.factor >= 0}


def in_double(case: Sample) -> Sample:
    """The call in double precision, in which a difference is no rounding."""
    if all(value.dtype is torch.float64 or not value.is_floating_point() for value in case.values):
        return case
    values = [value.double() if value.is_floating_point() else value for value in case.values]
    try:
        return with_values(case, values)
    except Exception as error:
        raise DiscoveryError(
            f"{case.kind} cannot be executed in float64, in which rules are proven: {error}"
        ) from error
