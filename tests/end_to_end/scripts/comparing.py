"""Holds what became of a script on the ranks of a plan against what is expected of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.end_to_end.scripts.running import Outcome
from tests.end_to_end.scripts.steps import WEIGHT
from tests.end_to_end.scripts.table import Expected, Script, Values


def wrong(
    script: Script,
    expected: Expected,
    ranks: Sequence[Outcome],
    reference: Sequence[Outcome] | None,
) -> str:
    """The differences, in words; empty where all is right."""
    for number, outcome in enumerate(ranks):
        if outcome.error and not outcome.known:
            return f"rank {number}: {outcome.error}\n{outcome.trace}"
    errors = {outcome.error for outcome in ranks}
    if errors != {""}:
        if len(errors) > 1:
            return (
                "the ranks do not agree: "
                f"{', '.join(sorted(error or 'no error' for error in errors))}"
            )
        return f"refused: {errors.pop()}" if expected == "equal" else ""
    if expected == "refused":
        return "not refused"
    assert reference is not None
    (alone,) = reference
    if alone.values is None:
        return f"the reference fails: {alone.trace}"
    return _unequal([outcome.values or {} for outcome in ranks], alone.values, script.tolerance)


def _unequal(ranks: Sequence[Values], wanted: Values, tolerance: float) -> str:
    """The values that differ: weights may lie on some ranks only, everything else is on all."""
    actual: list[str] = []
    for number, values in enumerate(ranks):
        extra = [name for name in values if name not in wanted]
        lacking = [name for name in wanted if name not in values and not name.startswith(WEIGHT)]
        actual += [
            f"rank {number} {'has also' if name in extra else 'lacks'} {name!r}"
            for name in extra + lacking
        ]
    for name, value in wanted.items():
        held = [(number, values[name]) for number, values in enumerate(ranks) if name in values]
        # Of a parameter of another stage a rank has nothing.
        theirs = [
            (number, own)
            for number, own in held
            if not (name.startswith(WEIGHT) and torch.as_tensor(own).numel() == 0)
        ]
        if not theirs:
            actual.append(f"no rank has {name!r}")
        actual += [
            f"rank {number}: {name}: {words}"
            for number, own in theirs
            if (words := _difference(own, value, tolerance))
        ]
    return "; ".join(actual[:6]) + (f"; and {len(actual) - 6} more" if len(actual) > 6 else "")


def _difference(own: Tensor | float, wanted: Tensor | float, tolerance: float) -> str:
    mine, theirs = (torch.as_tensor(value, dtype=torch.float64).detach() for value in (own, wanted))
    if mine.shape != theirs.shape:
        return f"shape {list(mine.shape)} for {list(theirs.shape)}"
    if mine.numel() == 0 or torch.equal(mine, theirs):
        return ""
    error = float((mine - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30))
    if error <= tolerance:
        return ""
    return (
        f"{float(mine):.12g} for {float(theirs):.12g}"
        if mine.numel() == 1
        else f"off by {error:.2g} of the largest"
    )
