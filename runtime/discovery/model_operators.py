"""Rules for a model's own operators, executed at small sizes.

The ranks of the tensors and the attributes are the model's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from autopar.errors import AutoparError, DiscoveryError, RuleError
from autopar.ir import Value
from autopar.runtime.proof import Disproved, Sample, sample
from autopar.sharding.notation import bind, parse_rule
from autopar.sharding.rules import Call, Entry

from .discover import MESHES, UNITS, Discovery, discover, factor_names, in_double, prove_all
from .example_calls import random_values
from .executed_calls import SEED, are_finite, outputs_of, require_function, resolved, seeded
from .linearity import is_differentiable
from .size_groups import integers_of, spread

SMALL = 24
"""Sizes up to this one stay unchanged."""
MAX_ELEMENTS = 500_000
"""The most input elements of an executed call."""


def discover_call(call: Call, constants: Mapping[str, np.ndarray]) -> Discovery:
    """The rule of an operator of a model.

    Raises a `DiscoveryError` where the operator cannot be executed at sizes small enough.
    """
    kind = call.operator.kind
    discovery = discover(_small(call, constants))
    assert isinstance(discovery.entry.rule, str)
    inputs = [tensor.shape for tensor in call.inputs]
    outputs = [tensor.shape for tensor in call.outputs]
    try:
        bind(parse_rule(discovery.entry.rule), inputs, outputs)
    except RuleError as error:
        raise DiscoveryError(
            f"{kind}: the rule of small calls does not fit its sizes in the model: {error}"
        ) from error
    return discovery


def prove_call(entry: Entry, call: Call, constants: Mapping[str, np.ndarray]) -> set[str]:
    """Prove a given rule of a model's operator on small calls.

    Returns the factors that no size allowed to split. Raises `Disproved` with the contradiction.
    """
    case = in_double(_small(call, constants))
    require_function(case)
    samples = [case, *(spread(case, unit=unit, seed=unit) for unit in UNITS)]
    _, split = prove_all(case.kind, entry, samples, MESHES)
    # The table's word on gradients decides what is communicated backward, so it is checked as well.
    if entry.differentiable != is_differentiable(samples[1]):
        claim = "differentiable" if entry.differentiable else "not differentiable"
        raise Disproved(f"{case} is said to be {claim}")
    return set(factor_names(samples[1], case.kind, entry)) - split


def _small(call: Call, constants: Mapping[str, np.ndarray]) -> Sample:
    """A sample of the first of the smaller sizes that the operator takes.

    Else of its own sizes, where they are small enough.
    """
    problem = "every size is held by an attribute"
    for sizes in _mappings(call):
        shapes = [tuple(sizes.get(size, size) for size in tensor.shape) for tensor in call.inputs]
        if sum(map(math.prod, shapes)) > MAX_ELEMENTS:
            elements = sum(map(math.prod, shapes))
            problem = f"its inputs hold {elements:,} elements, and its attributes may hold sizes"
            continue
        # Logarithms and roots are not finite on values of either sign.
        for positive in (False, True):
            values = [
                _value(call, index, shape, constants, positive)
                for index, shape in enumerate(shapes)
            ]
            try:
                case = _sample(call, values)
            except AutoparError:
                raise
            except Exception as error:
                # Whatever the operator raises, it does not take these sizes.
                problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            shapes_here = (case.graph.tensors[name].shape for name in case.operator.outputs)
            same_ranks = [len(t.shape) for t in call.outputs] == [len(s) for s in shapes_here]
            if same_ranks and are_finite(outputs_of(case)):
                return case
            problem = "it gives other outputs than in the model, or values that are not finite"
    raise DiscoveryError(f"{call.operator.kind}: it cannot be executed at small sizes: {problem}")


def _mappings(call: Call) -> Iterator[dict[int, int]]:
    """Mappings of the model's sizes to small ones.

    First distinct multiples of 6, then sizes in their ratios, then unchanged ones. No size becomes
    smaller than an integer among the attributes, which may be an offset or a length.
    """
    integers = list(integers_of(tuple(call.operator.attributes.values())))
    sizes = sorted({size for tensor in call.inputs for size in tensor.shape})
    large = [size for size in sizes if size > SMALL]
    least = max((abs(number) for number in integers), default=0)
    # Attributes of the model's own size leave no room below it.
    if least < SMALL * 4:
        # Multiples of 6 divide by the sizes 2, 3 and 6 of the meshes on which rules are proven.
        fresh = iter(n for n in range(6 * (least // 6 + 1), 6 * 10**6, 6) if n not in sizes)
        yield {size: min(size, next(fresh)) for size in large}
        unit = math.gcd(*large) if large else 1
        scale = 6 * (least // 6 + 1)
        yield {size: size // unit * scale for size in large if size // unit * scale < size}
    yield {}


def _value(
    call: Call,
    index: int,
    shape: tuple[int, ...],
    constants: Mapping[str, np.ndarray],
    positive: bool,
) -> Tensor:
    """A constant's own values where its shape is kept, else random ones."""
    tensor = call.inputs[index]
    if tensor.name in constants and constants[tensor.name].shape == shape:
        return torch.from_numpy(np.array(constants[tensor.name]))
    generator = torch.Generator().manual_seed(SEED + index)
    return random_values(shape, getattr(torch, tensor.dtype), generator, positive=positive)


def _sample(call: Call, values: list[Tensor]) -> Sample:
    """A sample of the call on other values."""
    attributes: Mapping[str, Value] = call.operator.attributes
    arguments = {name: resolved(value, values) for name, value in attributes.items()}
    with seeded(), torch.no_grad():
        return sample(call.operator.kind, "", **arguments)
