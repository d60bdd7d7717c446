"""Rules for a model's own operators: a call is executed at small sizes, with the model's ranks and attributes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from autopar.errors import AutoparError, DiscoveryError, RuleError
from autopar.ir import Value
from autopar.sharding.notation import bind, parse_rule
from autopar.sharding.rules import Call, Entry

from ..proof import Disproved, Sample, sample
from .calls import SEED, outputs_of, require_function, resolved, seeded
from .discover import MESHES, UNITS, Discovery, discover, factor_names, in_double, prove_all
from .sizes import integers_of, spread
from .smoothness import is_differentiable
from .targets import random_values

SMALL = 24
"""Sizes up to this one stay unchanged."""
MAX_ELEMENTS = 500_000
"""The most input elements of an executed call."""


def discover_call(call: Call, constants: Mapping[str, np.ndarray]) -> Discovery:
    """The rule of an operator of a model; a `DiscoveryError` where it cannot be executed at sizes small enough."""
    kind = call.operator.kind
    found = discover(_small(call, constants))
    assert isinstance(found.entry.rule, str)
    try:
        bind(parse_rule(found.entry.rule), [t.shape for t in call.inputs], [t.shape for t in call.outputs])
    except RuleError as error:
        raise DiscoveryError(f"{kind}: the rule of small calls does not fit its sizes in the model: {error}") from error
    return found


def prove_call(entry: Entry, call: Call, constants: Mapping[str, np.ndarray]) -> set[str]:
    """Prove a given rule of a model's operator on small calls; returns the factors that no size allowed to split.

    Raises `Disproved` with the contradiction.
    """
    case = in_double(_small(call, constants))
    require_function(case)
    samples = [case, *(spread(case, unit=unit, seed=unit) for unit in UNITS)]
    _, split = prove_all(case.kind, entry, samples, MESHES)
    if entry.differentiable != is_differentiable(samples[1]):
        raise Disproved(f"{case} is said to be {'' if entry.differentiable else 'not '}differentiable")
    return set(factor_names(samples[1], case.kind, entry)) - split


def _small(call: Call, constants: Mapping[str, np.ndarray]) -> Sample:
    """The first of the smaller sizes that the operator takes, else its own where they are small enough."""
    problem = "every size is held by an attribute"
    for sizes in _mappings(call):
        shapes = [tuple(sizes.get(size, size) for size in tensor.shape) for tensor in call.inputs]
        if sum(map(math.prod, shapes)) > MAX_ELEMENTS:
            problem = f"its inputs hold {sum(map(math.prod, shapes)):,} elements, and its attributes may hold sizes"
            continue
        for positive in (False, True):
            values = [_value(call, index, shape, constants, positive) for index, shape in enumerate(shapes)]
            try:
                made = _sample(call, values)
            except AutoparError:
                raise
            except Exception as error:  # whatever the operator raises, it does not take these sizes
                problem = f"{type(error).__name__}: {str(error).splitlines()[0]}"
                continue
            ranks = [len(t.shape) for t in call.outputs] == [len(made.graph.tensors[n].shape) for n in made.operator.outputs]
            if ranks and all(bool(v.isfinite().all()) for v in outputs_of(made) if v.is_floating_point()):
                return made
            problem = "it gives other outputs than in the model, or values that are not finite"
    raise DiscoveryError(f"{call.operator.kind}: it cannot be executed at small sizes: {problem}")


def _mappings(call: Call) -> Iterator[dict[int, int]]:
    """Mappings of the model's sizes to small ones: distinct multiples of 6, then sizes in their ratios, then unchanged.

    No size becomes smaller than an integer among the attributes, which may be an offset or a length.
    """
    integers = list(integers_of(tuple(call.operator.attributes.values())))
    sizes = sorted({size for tensor in call.inputs for size in tensor.shape})
    large = [size for size in sizes if size > SMALL]
    least = max((abs(number) for number in integers), default=0)
    if least < SMALL * 4:
        fresh = iter(n for n in range(6 * (least // 6 + 1), 6 * 10**6, 6) if n not in sizes)
        yield {size: min(size, next(fresh)) for size in large}
        unit = math.gcd(*large) if large else 1
        scale = 6 * (least // 6 + 1)
        yield {size: size // unit * scale for size in large if size // unit * scale < size}
    yield {}


def _value(call: Call, index: int, shape: tuple[int, ...], constants: Mapping[str, np.ndarray], positive: bool) -> Tensor:
    """A constant's own values where its shape is kept, else random ones."""
    tensor = call.inputs[index]
    if tensor.name in constants and constants[tensor.name].shape == shape:
        return torch.from_numpy(np.array(constants[tensor.name]))
    return random_values(shape, getattr(torch, tensor.dtype), torch.Generator().manual_seed(SEED + index), positive=positive)


def _sample(call: Call, values: list[Tensor]) -> Sample:
    attributes: Mapping[str, Value] = call.operator.attributes
    with seeded(), torch.no_grad():
        return sample(call.operator.kind, "", **{name: resolved(value, values) for name, value in attributes.items()})
