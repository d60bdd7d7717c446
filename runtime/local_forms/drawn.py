"""Random numbers for a shard: its part of the whole, drawn by counter or by torch's generator (see `draws`)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ir import Value

from ..collectives import Cut, shard_of
from ..draws import current, operator_number
from ..functions import arguments_of, function_of
from ..local_call import Cuts, LocalCall
from ..random_bits import Region
from ..random_numbers import Source
from .registry import register
from .seeded import torch_seeded

Draw = Callable[..., Tensor]
"""Numbers from a source, of a type, with the operator's own arguments; `self` is a tensor where these have one."""


def drawn(kind: str, shape: Sequence[int], cuts: Cuts, operator: int, device: torch.device | None = None, **arguments: Any) -> Tensor:
    """This rank's part of numbers of the whole `shape`."""
    like = next((value for value in arguments.values() if isinstance(value, Tensor)), None)
    place = like.device if like is not None else device or torch.device("cpu")
    draws, dtype = current(), arguments.get("dtype")
    if dtype is None:
        dtype = like.dtype if like is not None else torch.int64 if "randint" in kind else torch.get_default_dtype()
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    if draws.exact:
        return _by_torch(kind, shape, cuts, place, arguments)
    if dtype.is_complex:
        with torch_seeded(draws, operator, place):
            return _by_torch(kind, shape, cuts, place, arguments)
    return _DRAWS[kind](Source(draws, operator, Region.of(shape, cuts, place)), dtype, **arguments)


def _by_torch(kind: str, shape: Sequence[int], cuts: Cuts, device: torch.device, arguments: Mapping[str, Any]) -> Tensor:
    """Drawn for the whole tensor, and cut."""
    function, given = function_of(kind), dict(arguments)
    if kind in LIKE:
        given["self"] = given["self"].new_empty(tuple(shape))
    whole = function(**arguments_of(function, given, (), device))
    return shard_of(whole, [Cut(*cut) for cut in cuts])


def _uniform(source: Source, dtype: torch.dtype, **given: Any) -> Tensor:
    low, high = given.get("from", 0.0), given.get("to", 1.0)
    return source.uniform(dtype).mul_(high - low).add_(low)


def _normal(source: Source, dtype: torch.dtype, mean: Tensor | float = 0.0, std: Tensor | float = 1.0, **_: Any) -> Tensor:
    return source.normal(dtype) * std + mean


def _log_normal(source: Source, dtype: torch.dtype, mean: float = 1.0, std: float = 2.0, **_: Any) -> Tensor:
    return _normal(source, dtype, mean, std).exp_()


def _cauchy(source: Source, dtype: torch.dtype, median: float = 0.0, sigma: float = 1.0, **_: Any) -> Tensor:
    return source.uniform(dtype).sub_(0.5).mul_(math.pi).tan_().mul_(sigma).add_(median)


def _exponential(source: Source, dtype: torch.dtype, lambd: float = 1.0, **_: Any) -> Tensor:
    return source.exponential(dtype).div_(lambd)


def _geometric(source: Source, dtype: torch.dtype, p: float, **_: Any) -> Tensor:
    return source.exponential(torch.float64).div_(-math.log1p(-p) if p < 1 else math.inf).ceil_().clamp_(min=1).to(dtype)


def _bernoulli(source: Source, dtype: torch.dtype, **given: Any) -> Tensor:
    rate = given.get("p", given["self"])
    chosen = source.uniform(torch.float64) < rate if isinstance(rate, Tensor) else source.chosen(rate)
    return chosen.to(dtype)


def _integers(source: Source, dtype: torch.dtype, high: int, low: int = 0, **_: Any) -> Tensor:
    return source.integers(low, high).to(dtype)


def _random(source: Source, dtype: torch.dtype, **given: Any) -> Tensor:
    """Without bounds: all integers that the type holds exactly, from zero on."""
    high = given.get("to")
    if high is None:
        most = 1 if dtype == torch.bool else round(2 / torch.finfo(dtype).eps) if dtype.is_floating_point else torch.iinfo(dtype).max
        high = most + 1
    return source.integers(given.get("from") or 0, high).to(dtype)


def _table(rows: Mapping[str, Draw]) -> dict[str, Draw]:
    return {f"aten.{name}": draw for names, draw in rows.items() for name in names.split()}


LIKE: Mapping[str, Draw] = _table({
    "rand_like.default uniform.default": _uniform,
    "randn_like.default normal_functional.default": _normal,
    "randint_like.default randint_like.low_dtype": _integers,
    "bernoulli.p": _bernoulli,
    "exponential.default": _exponential,
    "geometric.default": _geometric,
    "log_normal.default": _log_normal,
    "cauchy.default": _cauchy,
    "random.default random.from random.to": _random,
})  # fmt: skip
"""Random numbers that take no more from a tensor than its shape and type."""
_WHOLE: Mapping[str, Draw] = _table({
    "rand.default": _uniform,
    "randn.default normal.float_float normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor": _normal,
    "randint.default randint.low": _integers,
    "bernoulli.default bernoulli.Tensor": _bernoulli,
})  # fmt: skip
"""Operators with a given shape, or with parameters in tensors."""
_DRAWS = {**LIKE, **_WHOLE}


def _knows(call: LocalCall) -> Mapping[str, Value]:
    """The shape of the whole, and where this rank's part lies."""
    cuts = tuple(tuple(cut) for cut in call.cuts(call.decision.outputs[0]))
    return {"shape": call.outputs[0].shape, "cuts": cuts, "operator": operator_number(call.operator.name), "device": None}


for _kind in _DRAWS:
    register(_kind, knows=_knows, local=functools.partial(drawn, _kind))
