"""Random numbers for a shard: its part of the whole, drawn by counter or by torch's generator.

`draws` says which of the two a module uses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Value
from autopar.runtime.operators.functions import arguments_of, function_of
from autopar.runtime.operators.local_call import Cuts, LocalCall
from autopar.runtime.operators.registry import register
from autopar.runtime.random_numbers.counter_bits import Region
from autopar.runtime.random_numbers.distributions import Source
from autopar.runtime.random_numbers.draw_state import current, operator_number
from autopar.runtime.ranks.cuts import Cut, shard_of

from .seeded_operators import torch_seeded

Draw = Callable[..., Tensor]
"""Numbers from a source, of a type, with the operator's own arguments, its tensor `self` too."""


def drawn(
    kind: str,
    shape: Sequence[int],
    cuts: Cuts,
    operator: int,
    device: torch.device | None = None,
    **arguments: Any,
) -> Tensor:
    """This rank's part of random numbers of the whole `shape`."""
    # The device is that of a tensor argument, else the operator's own.
    like = next((value for value in arguments.values() if isinstance(value, Tensor)), None)
    place = like.device if like is not None else device or torch.device("cpu")
    draws = current()
    dtype = arguments.get("dtype") or _default_dtype(kind, like)
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if draws.exact:
        return _by_torch(kind, shape, cuts, place, arguments)
    # The counters give no complex numbers: every rank draws the whole, and takes its part.
    if dtype.is_complex:
        with torch_seeded(draws, operator, place):
            return _by_torch(kind, shape, cuts, place, arguments)
    return _DRAWS[kind](Source(draws, operator, Region.of(shape, cuts, place)), dtype, **arguments)


def _default_dtype(kind: str, like: Tensor | None) -> torch.dtype:
    """The dtype of an operator's numbers where its arguments name none."""
    if like is not None:
        return like.dtype
    return torch.int64 if "randint" in kind else torch.get_default_dtype()


def _by_torch(
    kind: str, shape: Sequence[int], cuts: Cuts, device: torch.device, arguments: Mapping[str, Any]
) -> Tensor:
    """This rank's part of numbers that torch's generator draws for the whole tensor."""
    function = function_of(kind)
    inputs = dict(arguments)
    if kind in LIKE:
        inputs["self"] = inputs["self"].new_empty(tuple(shape))
    # As many numbers as on one device, so that the generator goes on alike on every rank.
    whole = function(**arguments_of(function, inputs, (), device))
    return shard_of(whole, [Cut(*cut) for cut in cuts])


def _uniform(source: Source, dtype: torch.dtype, **arguments: Any) -> Tensor:
    # `from` is a keyword of Python, so it cannot be a parameter.
    low = arguments.get("from", 0.0)
    high = arguments.get("to", 1.0)
    return source.uniform(dtype).mul_(high - low).add_(low)


def _normal(
    source: Source,
    dtype: torch.dtype,
    mean: Tensor | float = 0.0,
    std: Tensor | float = 1.0,
    **_: Any,
) -> Tensor:
    return source.normal(dtype) * std + mean


def _log_normal(
    source: Source, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0, **_: Any
) -> Tensor:
    return _normal(source, dtype, mean, std).exp_()


def _cauchy(
    source: Source, dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0, **_: Any
) -> Tensor:
    return source.uniform(dtype).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)


def _exponential(source: Source, dtype: torch.dtype, lambd: float = 1.0, **_: Any) -> Tensor:
    return source.exponential(dtype).div_(lambd)


def _geometric(source: Source, dtype: torch.dtype, p: float, **_: Any) -> Tensor:
    # A geometric number is an exponential one rounded up: P(n > k) = (1 - p)^k.
    rate = -math.log1p(-p) if p < 1 else math.inf
    return source.exponential(torch.float64).div_(rate).ceil_().clamp_(min=1).to(dtype)


def _bernoulli(source: Source, dtype: torch.dtype, **arguments: Any) -> Tensor:
    rate = arguments.get("p", arguments["self"])
    if isinstance(rate, Tensor):
        return (source.uniform(torch.float64) < rate).to(dtype)
    return source.chosen(rate).to(dtype)


def _integers(source: Source, dtype: torch.dtype, high: int, low: int = 0, **_: Any) -> Tensor:
    return source.integers(low, high).to(dtype)


def _random(source: Source, dtype: torch.dtype, **arguments: Any) -> Tensor:
    """Integers between bounds; without them all that the type holds exactly, from zero on."""
    high = arguments.get("to")
    if high is None:
        high = _largest_integer(dtype) + 1
    return source.integers(arguments.get("from") or 0, high).to(dtype)


def _largest_integer(dtype: torch.dtype) -> int:
    """The largest integer up to which a type holds every integer."""
    if dtype == torch.bool:
        return 1
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps)
    return torch.iinfo(dtype).max


def _table(rows: Mapping[str, Draw]) -> dict[str, Draw]:
    return {f"aten.{name}": draw for names, draw in rows.items() for name in names.split()}


LIKE: Mapping[str, Draw] = _table(
    {
        "rand_like.default uniform.default": _uniform,
        "randn_like.default normal_functional.default": _normal,
        "randint_like.default randint_like.low_dtype": _integers,
        "bernoulli.p": _bernoulli,
        "exponential.default": _exponential,
        "geometric.default": _geometric,
        "log_normal.default": _log_normal,
        "cauchy.default": _cauchy,
        "random.default random.from random.to": _random,
    }
)
"""Random numbers that take no more from a tensor than its shape and type."""
_WHOLE: Mapping[str, Draw] = _table(
    {
        "rand.default": _uniform,
        "randn.default normal.float_float normal.Tensor_float": _normal,
        "normal.float_Tensor normal.Tensor_Tensor": _normal,
        "randint.default randint.low": _integers,
        "bernoulli.default bernoulli.Tensor": _bernoulli,
    }
)
"""Operators with a given shape, or with parameters in tensors."""
_DRAWS = {**LIKE, **_WHOLE}


def _knows(call: LocalCall) -> Mapping[str, Value]:
    """The shape of the whole tensor, and where this rank's part of it lies."""
    cuts = tuple(tuple(cut) for cut in call.cuts(call.decision.outputs[0]))
    return {
        "shape": call.outputs[0].shape,
        "cuts": cuts,
        "operator": operator_number(call.operator.name),
        "device": None,
    }


for _kind in _DRAWS:
    register(_kind, knows=_knows, local=functools.partial(drawn, _kind))
