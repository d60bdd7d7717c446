"""Properties of an operator as a function: sets of inputs in which it is linear, and inputs that get gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..functions import function_of
from ..proof import Sample
from .calls import combinations, drawn_like, execute, outputs_of
from .loops import equal

MAX_SETS = 64
"""The number of sets of inputs tried for linearity, the smallest first."""
SCALES = (-0.7, 60.0, -5000.0)
"""Factors of an input; the large ones reveal functions that are linear near zero only."""
EXACT_SCALES = (2.0**40, 2.0**-40)
"""Powers of two, by which a linear function is multiplied without rounding: they find out limits that are far off."""


def linear_sets(case: Sample, addends: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """The smallest sets of inputs in which (with the addends) the operator is linear: f(a x + y) = a f(x) + f(y)."""
    floats = [i for i, value in enumerate(case.values) if value.is_floating_point()]
    whole = outputs_of(case)
    if not whole or not all(value.is_floating_point() for value in whole):
        return ()
    found: list[tuple[int, ...]] = []
    for members in combinations([i for i in floats if i not in addends], MAX_SETS)[1:]:
        if not any(set(smaller) <= set(members) for smaller in found) and _is_linear(case, whole, {*members, *addends}):
            found.append(members)
    return tuple(found)


def _is_linear(case: Sample, whole: Sequence[Tensor], members: set[int]) -> bool:
    generator = torch.Generator().manual_seed(len(members))
    other = [drawn_like(v, tuple(v.shape), generator, fresh=True) for v in case.values]

    def at(scale: float, share: float) -> list[Tensor]:
        """The outputs at scale * values + share * other values."""
        pairs = enumerate(zip(case.values, other, strict=True))
        return outputs_of(case, [(scale * v + share * o if share else scale * v) if i in members else v for i, (v, o) in pairs])

    try:
        second = at(0.0, 1.0)
        for scale in SCALES:
            if not _all_equal(at(scale, 1.0), [scale * f + g for f, g in zip(whole, second, strict=True)]):
                return False
        if not all(_all_equal(at(scale, 0.0), [scale * f for f in whole]) for scale in EXACT_SCALES):
            return False
        # Non-finite values must stay non-finite: a share of a sum may not be finite where the whole is.
        return not any(bool(value.isfinite().all()) for end in (math.nan, math.inf) for value in at(end, 0.0))
    except Exception:  # whatever the operator raises, it does not take such values
        return False


def _all_equal(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    return all(equal(a, b) for a, b in zip(found, wanted, strict=True))


def is_differentiable(case: Sample) -> bool:
    """Whether autograd finds a way from some output to some input and brings more than zeros there."""
    return any(_carries(case, index) for index, value in enumerate(case.values) if value.is_floating_point())


def _carries(case: Sample, index: int) -> bool:
    leaf = case.values[index].detach().clone().requires_grad_()
    values = [leaf if i == index else value for i, value in enumerate(case.values)]
    generator = torch.Generator().manual_seed(1)
    try:
        outputs = [value for value in execute(function_of(case.kind), case.operator.attributes, values) if value.requires_grad]
        ahead = [torch.randn(value.shape, dtype=value.dtype, generator=generator) for value in outputs]
        (found,) = torch.autograd.grad(outputs, [leaf], ahead, allow_unused=True) if outputs else (None,)
    except (RuntimeError, NotImplementedError):
        return False
    return found is not None and bool((found != 0).any())
