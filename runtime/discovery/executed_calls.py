"""One call of an operator, repeated on other values, sizes and shards.

Torch's random state is as before afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.errors import DiscoveryError
from autopar.ir import Ref, Value
from autopar.runtime.lowering.localise import localise
from autopar.runtime.operators.functions import arguments_of, function_of
from autopar.runtime.operators.local_call import LocalCall
from autopar.runtime.operators.registry import form_of
from autopar.runtime.proof import Sample, sample, shard
from autopar.runtime.proof.sample import CPU
from autopar.sharding.layout import Layout, replicated
from autopar.sharding.program import Decision

SEED = 7
Shapes = Sequence[Sequence[int]]


@contextlib.contextmanager
def seeded(seed: int = SEED) -> Iterator[None]:
    """Let torch's random numbers follow `seed`, and restore its generator behind."""
    before = torch.get_rng_state()
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before)


def execute(
    function: Any, attributes: Mapping[str, Value], inputs: Sequence[Tensor], *, seed: int = SEED
) -> list[Tensor]:
    """The outputs of one call; whatever it draws at random follows `seed`."""
    with seeded(seed):
        results = function(**arguments_of(function, attributes, inputs, CPU))
    return list(results) if isinstance(results, list | tuple) else [results]


def outputs_of(
    case: Sample, values: Sequence[Tensor] | None = None, *, seed: int = SEED
) -> list[Tensor]:
    """The outputs of the whole operator, on the sample's values or on others of the same shapes."""
    inputs = case.values if values is None else values
    with torch.no_grad():
        return execute(function_of(case.kind), case.operator.attributes, inputs, seed=seed)


def outputs_of_shards(
    case: Sample, layouts: Sequence[Layout], degree: int, zeroed: frozenset[int] = frozenset()
) -> list[list[Tensor]]:
    """Outputs of each of `degree` ranks from its shards.

    Inputs in `zeroed` are zeros on all ranks but the first.
    """
    operator = case.operator
    tensors = case.graph.tensors
    # Without a rule: the layouts alone say how inputs are cut, and outputs are taken as they come.
    decision = Decision(
        options=(),
        rule=None,
        inputs=tuple(layouts),
        outputs=(replicated(1),) * len(operator.outputs),
    )
    outputs = []
    for rank in range(degree):
        call = LocalCall(
            operator=operator,
            decision=decision,
            inputs=tuple(tensors[n] for n in operator.inputs),
            outputs=tuple(tensors[n] for n in operator.outputs),
            mesh=(degree,),
            coordinate=(rank,),
        )
        local = localise(call)
        held = [
            shard(value, layout, (degree,), (rank,))
            for value, layout in zip(case.values, layouts, strict=True)
        ]
        # Replicated addends would be added once a rank: all but the first rank hold zeros of them.
        held = [
            torch.zeros_like(value) if rank and index in zeroed else value
            for index, value in enumerate(held)
        ]
        with torch.no_grad():
            outputs.append(execute(local.function, local.attributes, held))
    return outputs


def require_function(case: Sample) -> None:
    """Refuse an operator that is no function of its inputs.

    These are operators with in-place changes, random numbers, or changing results.
    """
    before = [value.clone() for value in case.values]
    # Three calls: the second shows state inside the operator, the one with another seed random
    # numbers.
    first = outputs_of(case)
    second = outputs_of(case)
    other = outputs_of(case, seed=SEED + 1)
    if not all(isinstance(value, Tensor) for value in first):
        raise DiscoveryError(f"{case.kind} gives something other than tensors")
    if any(not torch.equal(a, b) for a, b in zip(before, case.values, strict=True)):
        raise DiscoveryError(
            f"{case.kind} changes its inputs in place; write it so that it returns what it makes"
        )
    if not same(first, second):
        raise DiscoveryError(
            f"{case.kind} gives other results when it is called again with the same inputs"
        )
    if not same(first, other) and form_of(case.kind).local is None:
        raise DiscoveryError(
            f"{case.kind} draws random numbers; shards would draw others than the whole"
        )


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Whether two lists of outputs are equal to the last bit."""
    return all(
        a.shape == b.shape and torch.equal(a.nan_to_num(), b.nan_to_num())
        for a, b in zip(left, right, strict=True)
    )


def resized(case: Sample, shapes: Shapes, seed: int) -> Sample | None:
    """The call at other input sizes, with values like the old ones.

    None where the operator does not take these sizes.
    """
    generator = torch.Generator().manual_seed(seed)
    values = [
        drawn_like(value, tuple(shape), generator)
        for value, shape in zip(case.values, shapes, strict=True)
    ]
    try:
        fresh = with_values(case, values)
    except Exception:
        # Whatever the operator raises, it means that these sizes are none.
        return None
    # Values that are not finite only at the new sizes come from a division by zero or the like.
    return fresh if are_finite(outputs_of(fresh)) or not are_finite(outputs_of(case)) else None


def are_finite(values: Sequence[Tensor]) -> bool:
    """Whether all floats are finite."""
    return all(bool(value.isfinite().all()) for value in values if value.is_floating_point())


def with_values(case: Sample, values: Sequence[Tensor]) -> Sample:
    """The same call with other inputs."""
    arguments = {name: resolved(value, values) for name, value in case.operator.attributes.items()}
    with seeded(), torch.no_grad():
        return sample(case.kind, case.note, **arguments)


def resolved(value: Value, inputs: Sequence[Tensor]) -> Any:
    """An attribute with tensors in the place of references."""
    if isinstance(value, Ref):
        return inputs[value.index]
    return tuple(resolved(item, inputs) for item in value) if isinstance(value, tuple) else value


def drawn_like(
    value: Tensor, shape: tuple[int, ...], generator: torch.Generator, *, fresh: bool = False
) -> Tensor:
    """Values like those of a tensor: floats between two elements, else elements.

    The tensor itself if the shapes agree, unless `fresh`.
    """
    if tuple(value.shape) == shape and not fresh:
        return value
    count = torch.Size(shape).numel()
    pool = value.reshape(-1)
    if not len(pool):
        return value.new_zeros(shape)
    picks = [pool[torch.randint(len(pool), (count,), generator=generator)] for _ in range(2)]
    if not value.is_floating_point():
        return picks[0].reshape(shape)
    # Between two elements, so that a value stays in the range of the example, as a logarithm needs.
    weight = torch.rand(count, dtype=value.dtype, generator=generator)
    return (picks[0] * weight + picks[1] * (1 - weight)).reshape(shape)


def combinations(items: Sequence[Any], limit: int) -> list[tuple[Any, ...]]:
    """Subsets by size, the empty one first, at most `limit` of them."""
    by_size = (itertools.combinations(items, count) for count in range(len(items) + 1))
    return list(itertools.islice(itertools.chain.from_iterable(by_size), limit))
