"""Torch's own samples of its operators (`op_db`), as calls of the aten operators that have a
sharding rule.

Torch writes its samples with sizes such as 5, which no mesh divides, and 1. Each is therefore run
again with the sizes that its author named (`S`, `M`, ...) set to others, and with every size of its
tensors rounded up to a multiple.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

from tests.sharding.capture import Captured, capture, spell

SIZES: tuple[Mapping[str, int], ...] = (
    {},
    {"S": 6, "M": 12, "L": 24, "XS": 3},
    {"S": 4, "M": 8, "L": 16, "XS": 2},
)
"""What the names of sizes in torch's samples stand for; as torch has them, S = 5, M = 10, L = 20,
XS = 3.
"""
MULTIPLES = (6, 4)
DTYPES = (torch.float64, torch.int64, torch.bool, torch.float32, torch.complex128)
MOST = 400
PER_OPERATOR = 16
QUICK = 3
"""How many of an operator's samples are made at most, and about how many of them, evenly spread,
are run: in full and quickly.
"""

UNCHECKED = frozenset({"_segment_reduce"})
"""Operators that read memory by an argument's values without a look at the sizes: run with torch's
sizes only.
"""


def operators() -> list[OpInfo]:
    """Every operator of torch's database, in its order."""
    return list(op_db)


def calls_of(
    operator: OpInfo, kinds: Collection[str], *, quick: bool = False
) -> Iterator[Captured]:
    """The calls of `kinds` that an operator's samples make, those with equal signatures once;
    `quick`: of few samples of one type.
    """
    seen: set[str] = set()
    with _deterministic(operator.name):
        for dtype, sizes in itertools.product(DTYPES, SIZES):
            if dtype not in operator.supported_dtypes("cpu") or (
                (quick or dtype != DTYPES[0]) and sizes is not SIZES[1]
            ):
                continue
            sizes = {} if operator.name in UNCHECKED else sizes
            for position, sample in enumerate(_samples(operator, dtype, sizes, quick)):
                for function in (operator.op, *(_names(operator) if position < QUICK else ())):

                    def run(
                        sample: SampleInput = sample, function: Callable[..., Any] = function
                    ) -> None:
                        torch.default_generator.manual_seed(0)
                        function(sample.input, *sample.args, **sample.kwargs)

                    yield from capture(run, kinds, seen)
            if quick:
                return


def _names(operator: OpInfo) -> list[Callable[..., Any]]:
    """The other names of an operator: aliases, and the method of a tensor."""
    others = (
        operator.method_variant,
        *(f for alias in operator.aliases for f in (alias.op, alias.method_variant)),
    )
    return [function for function in others if function is not None]


def _samples(
    operator: OpInfo, dtype: torch.dtype, sizes: Mapping[str, int], quick: bool
) -> Iterator[SampleInput]:
    """Samples that differ in a shape or in an argument; those of the first dtype with their sizes
    rounded up as well.
    """
    torch.default_generator.manual_seed(0)
    with _sizes(sizes):
        try:
            samples = list(
                itertools.islice(operator.sample_inputs("cpu", dtype, set_seed=False), MOST)
            )
        except Exception:
            # Some generators of samples count on the sizes that torch gives them.
            samples = []
    seen: set[str] = set()
    rounded = dtype == DTYPES[0] and not quick and operator.name not in UNCHECKED
    for given in samples[:: max(1, len(samples) // (QUICK if quick else PER_OPERATOR))]:
        for sample in (given, *_rounded(given)) if rounded else (given,):
            text = spell([sample.input, sample.args, sorted(sample.kwargs.items())])
            if text not in seen:
                seen.add(text)
                yield sample


@contextlib.contextmanager
def _deterministic(name: str) -> Iterator[None]:
    """Seeds by an operator's name, so that a choice of operators draws what all of them draw; the
    callers' state stays.
    """
    seed = zlib.crc32(name.encode())
    python = random.getstate()
    numpy = np.random.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


@contextlib.contextmanager
def _sizes(sizes: Mapping[str, int]) -> Iterator[None]:
    """Give the names of sizes other values in all of torch's modules of samples."""
    modules = [
        m for name, m in sorted(sys.modules.items()) if name.startswith("torch.testing._internal.")
    ]
    before = [
        (m, name, vars(m)[name])
        for m in modules
        for name in sizes
        if isinstance(vars(m).get(name), int)
    ]
    for module, name, _ in before:
        setattr(module, name, sizes[name])
    try:
        yield
    finally:
        for module, name, value in before:
            setattr(module, name, value)


def _rounded(given: SampleInput) -> Iterator[SampleInput]:
    """The sample with every size above 1 rounded up to a multiple; sizes among the other arguments
    alike, or as they were.
    """
    generator = torch.Generator().manual_seed(0)
    for multiple in MULTIPLES:
        for lists in (False, True):

            def change(
                value: Any, inside: bool = False, multiple: int = multiple, lists: bool = lists
            ) -> Any:
                if isinstance(value, Tensor) and value.layout == torch.strided:
                    return _grown(value, multiple, generator)
                if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
                    return type(value)(change(item, True) for item in value)
                if (
                    lists
                    and inside
                    and isinstance(value, int)
                    and not isinstance(value, bool)
                    and value > 1
                ):
                    return -(-value // multiple) * multiple
                return value

            yield SampleInput(
                change(given.input),
                args=tuple(change(value) for value in given.args),
                kwargs={name: change(value) for name, value in given.kwargs.items()},
            )


def _grown(tensor: Tensor, multiple: int, generator: torch.Generator) -> Tensor:
    """The tensor with its elements repeated; floats shrink by up to a third, so that no rows are
    alike.
    """
    grown = tensor.detach()
    for dim, size in enumerate(tensor.shape):
        if size > 1 and size % multiple:
            grown = grown.index_select(dim, torch.arange(-(-size // multiple) * multiple) % size)
    if grown.shape == tensor.shape or not grown.is_floating_point():
        return grown
    return grown * (1 - 0.3 * torch.rand(grown.shape, dtype=grown.dtype, generator=generator))
