"""From an example call to a proven rule: loops, linearity and gradients are found by executing, then proven."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import DiscoveryError, RuleError
from autopar.sharding.rules import RULES, Entry

from ..proof import Disproved, Sample, decisions, prove
from .calls import require_function, seeded, with_values
from .loops import Loop, find_loops
from .sizes import spread
from .smoothness import is_differentiable, linear_sets
from .text import rule_text

MESHES = ((2,), (3,), (2, 2))
"""The meshes on which a rule is proven."""
UNITS = (6, 4)
"""Sizes are spread over multiples of these: the first finds loops, the second refutes ratios that hold by accident."""


_COLUMNS = ("rule", "linear", "products", "differentiable", "saves")


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """A rule that was found and proven, as an `entry` of the table.

    `strategies`: the number of executed strategies, over all samples and meshes. `notes`: properties that could not be
    proven.
    """

    kind: str
    entry: Entry
    strategies: int
    notes: tuple[str, ...] = ()
    meshes: tuple[tuple[int, ...], ...] = MESHES

    def json(self) -> dict[str, Any]:
        """The discovery as plain values."""
        columns = {name: getattr(self.entry, name) for name in _COLUMNS}
        return {"kind": self.kind, **columns, "line": self.line, "strategies": self.strategies, "notes": list(self.notes)}

    @property
    def line(self) -> str:
        """The line of Python that registers the rule."""
        parts = [repr(self.kind), repr(self.entry.rule)]
        defaults = Entry(rule="")
        parts += [f"{name}={getattr(self.entry, name)!r}" for name in _COLUMNS[1:] if getattr(self.entry, name) != getattr(defaults, name)]
        return f"autopar.register_rule({', '.join(parts)})"


@contextlib.contextmanager
def on_trial(kind: str, entry: Entry) -> Iterator[None]:
    """Inside, a rule is in the table, in place of the present one."""
    before = RULES.pop(kind, None)
    RULES[kind] = entry
    try:
        yield
    finally:
        del RULES[kind]
        if before is not None:
            RULES[kind] = before


def discover(case: Sample) -> Discovery:
    """The sharding rule of the sample's operator; `DiscoveryError` if it is no function of its inputs.

    Loops that cannot be proven are left out, compounds first; the notes name them.
    """
    case = in_double(case)
    require_function(case)
    samples = [case, *(spread(case, unit=unit, seed=unit) for unit in UNITS)]
    found = find_loops(samples[1])
    notes: list[str] = []
    for kept in _fewer_and_fewer(found):
        addends = frozenset[int]().union(*(loop.addends for loop in kept))
        for linear in dict.fromkeys((linear_sets(samples[1], addends), ())):
            try:
                entry = _entry(samples[1], kept, linear)
            except RuleError as error:
                notes.append(f"not in the notation, so left out: {error}")
                break
            try:
                count, split = prove_all(case.kind, entry, samples, MESHES)
            except Disproved as error:
                notes.append(f"not proven, so left out: {entry.rule}: {str(error).splitlines()[0][:160]}")
                continue
            untried = sorted(set(factor_names(samples[1], case.kind, entry)) - split)
            notes += [f"no size divided, so not executed: a split of {', '.join(untried)}"] * bool(untried)
            return Discovery(kind=case.kind, entry=entry, strategies=count, notes=tuple(notes))
    raise DiscoveryError(f"{case.kind}: no rule could be proven: {'; '.join(notes[-1:])}")


def _fewer_and_fewer(loops: Sequence[Loop]) -> Iterator[list[Loop]]:
    """Ever smaller sets of loops: all, those without compounds, those without reductions either, none."""
    plain = [loop for loop in loops if not loop.compound]
    choices = [list(loops), plain, [loop for loop in plain if loop.reduction is None], []]
    return (choice for index, choice in enumerate(choices) if choice not in choices[:index])


def _entry(case: Sample, loops: Sequence[Loop], linear: tuple[tuple[int, ...], ...]) -> Entry:
    """The table's row; a product sums over a loop of several inputs, and not every loop is in all inputs."""
    products = any(
        loop.reduction == "sum" and sum(cut is not None for cut in loop.inputs) > 1 and any(None in other.inputs for other in loops)
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


def prove_all(kind: str, entry: Entry, samples: Sequence[Sample], meshes: Sequence[tuple[int, ...]]) -> tuple[int, set[str]]:
    """Prove a rule on samples and meshes; returns the number of executed strategies and the factors that they split.

    Raises `Disproved`.
    """
    count = 0
    split: set[str] = set()
    with on_trial(kind, entry), seeded():
        for case in samples:
            for mesh in meshes:
                try:
                    for decision in decisions(case, mesh):
                        assert decision.rule is not None
                        split |= {decision.rule.factors[o.factor].name for o in decision.options if o.factor >= 0}
                    count += prove(case, mesh)
                except ValueError as error:
                    raise Disproved(f"{case}: {error}") from error
    return count, split


def factor_names(case: Sample, kind: str, entry: Entry) -> Iterator[str]:
    """The factors that some option splits."""
    with on_trial(kind, entry):
        for decision in decisions(case, (1,)):
            assert decision.rule is not None
            yield from (decision.rule.factors[o.factor].name for o in decision.options if o.factor >= 0)


def in_double(case: Sample) -> Sample:
    """The call in double precision, in which a difference is no rounding."""
    if all(value.dtype is torch.float64 or not value.is_floating_point() for value in case.values):
        return case
    try:
        return with_values(case, [value.double() if value.is_floating_point() else value for value in case.values])
    except Exception as error:
        raise DiscoveryError(f"{case.kind} cannot be executed in float64, in which rules are proven: {error}") from error
