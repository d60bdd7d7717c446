"""Properties of an operator as a function: linearity in sets of inputs, and gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.runtime.operators.functions import function_of
from autopar.runtime.proof import Sample

from .executed_calls import combinations, drawn_like, execute, outputs_of
from .loops import equal

MAX_SETS = 64
"""The number of sets of inputs tried for linearity, the smallest first."""
SCALES = (-0.7, 60.0, -5000.0)
"""Factors of an input; the large ones reveal functions that are linear near zero only."""
EXACT_SCALES = (2.0**40, 2.0**-40)
"""Powers of two multiply a linear function without rounding, so they reveal distant limits."""


def linear_sets(case: Sample, addends: frozenset[int]) -> tuple[tuple[int, ...], ...]:
    """The smallest sets of inputs in which, with the addends, the operator is linear.

    Linear is f(a x + y) = a f(x) + f(y).
    """
    # Integers choose or count: an operator is linear in none of them.
    floats = [i for i, value in enumerate(case.values) if value.is_floating_point()]
    whole = outputs_of(case)
    if not whole or not all(value.is_floating_point() for value in whole):
        return ()
    linear: list[tuple[int, ...]] = []
    for members in combinations([i for i in floats if i not in addends], MAX_SETS)[1:]:
        if any(set(smaller) <= set(members) for smaller in linear):
            continue
        if _is_linear(case, whole, {*members, *addends}):
            linear.append(members)
    return tuple(linear)


def _is_linear(case: Sample, whole: Sequence[Tensor], members: set[int]) -> bool:
    """Whether an operator is linear in some inputs together, tried at small and large values."""
    generator = torch.Generator().manual_seed(len(members))
    other = [drawn_like(v, tuple(v.shape), generator, fresh=True) for v in case.values]

    def at(scale: float, share: float) -> list[Tensor]:
        """The outputs at scale * values + share * other values."""
        values = list(case.values)
        for index in members:
            values[index] = scale * values[index]
            if share:
                values[index] = values[index] + share * other[index]
        return outputs_of(case, values)

    try:
        second = at(0.0, 1.0)
        for scale in SCALES:
            wanted = [scale * f + g for f, g in zip(whole, second, strict=True)]
            if not _all_equal(at(scale, 1.0), wanted):
                return False
        for scale in EXACT_SCALES:
            if not _all_equal(at(scale, 0.0), [scale * f for f in whole]):
                return False
        # Non-finite values must stay non-finite: a share of a sum may not be finite where the whole
        # is.
        extremes = (*at(math.nan, 0.0), *at(math.inf, 0.0))
        return not any(bool(value.isfinite().all()) for value in extremes)
    except Exception:
        # Whatever the operator raises, it does not take such values.
        return False


def _all_equal(values: Sequence[Tensor], wanted: Sequence[Tensor]) -> bool:
    """Whether all outputs are as wanted, up to rounding."""
    return all(equal(a, b) for a, b in zip(values, wanted, strict=True))


def is_differentiable(case: Sample) -> bool:
    """Whether autograd brings more than zeros from some output to some input."""
    return any(
        _carries(case, index)
        for index, value in enumerate(case.values)
        if value.is_floating_point()
    )


def _carries(case: Sample, index: int) -> bool:
    """Whether an input gets a gradient other than zero."""
    # One input at a time, since a gradient for all of them could come from a single one.
    leaf = case.values[index].detach().clone().requires_grad_()
    values = [leaf if i == index else value for i, value in enumerate(case.values)]
    generator = torch.Generator().manual_seed(1)
    try:
        results = execute(function_of(case.kind), case.operator.attributes, values)
        outputs = [value for value in results if value.requires_grad]
        if not outputs:
            return False
        ahead = [
            torch.randn(value.shape, dtype=value.dtype, generator=generator) for value in outputs
        ]
        (gradient,) = torch.autograd.grad(outputs, [leaf], ahead, allow_unused=True)
    except (RuntimeError, NotImplementedError):
        return False
    return gradient is not None and bool((gradient != 0).any())
