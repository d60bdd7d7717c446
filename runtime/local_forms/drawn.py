"""Random numbers in the shape of a shard: this rank's part of those that a single device would draw."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from autopar.ir import Value

from ..collectives import Cut, shard_of
from ..functions import arguments_of, function_of
from ..local_call import Cuts, LocalCall
from .registry import register

LIKE = (
    "aten.rand_like.default", "aten.randn_like.default", "aten.randint_like.default", "aten.randint_like.low_dtype", "aten.bernoulli.p",
    "aten.uniform.default", "aten.exponential.default", "aten.normal_functional.default", "aten.geometric.default",
    "aten.log_normal.default", "aten.cauchy.default", "aten.random.default", "aten.random.from", "aten.random.to",
)  # fmt: skip
"""Random numbers that take no more from a tensor than its shape and type."""


def drawn_like(kind: str, self: Tensor, shape: Sequence[int], cuts: Cuts, **arguments: Any) -> Tensor:
    """This rank's shard of random numbers drawn for the whole tensor."""
    function = function_of(kind)
    whole = function(self.new_empty(tuple(shape)), **arguments_of(function, arguments, (self,), self.device))
    return shard_of(whole, [Cut(*cut) for cut in cuts])


def _whole(call: LocalCall) -> Mapping[str, Value]:
    """Random numbers in the shape of an input: drawn for the whole of it."""
    return {"shape": call.inputs[0].shape, "cuts": tuple(tuple(cut) for cut in call.cuts(call.decision.inputs[0]))}


for _kind in LIKE:
    register(_kind, knows=_whole, local=functools.partial(drawn_like, _kind))
