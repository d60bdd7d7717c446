"""`Schedule`: when the work of a step is done inside one stage, and in which types, beside where."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from ..errors import UsageError, unknown
from ..ir import DTYPE_BYTES, Graph, Tensor
from ..ir.dtype import FLOATS
from .gradient_formats import type_of

UNIT_BYTES = 25 * 2**20
"""25 MiB, as the buckets of torch's DistributedDataParallel (its `bucket_cap_mb`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """Floating-point types of trained parameters beside the one in which they stand in the model, that of the computation.

    `master`: in which they are stored and updated. `reduce`: in which their gradients travel and are added up. None: that of the
    computation.
    """

    master: str | None = None
    reduce: str | None = None

    def stored(self, tensor: Tensor) -> str:
        """The type in which a parameter is stored."""
        return self.master if self.master is not None and _trained(tensor) else tensor.dtype

    def reduced(self, tensor: Tensor) -> str:
        """The type in which the gradient of a parameter travels."""
        return self.reduce if self.reduce is not None and _trained(tensor) else tensor.dtype

    def casts(self, tensor: Tensor) -> bool:
        """Whether a parameter is used in another type than it is stored in."""
        return self.stored(tensor) != tensor.dtype

    def stored_bytes(self, tensor: Tensor) -> int:
        """Bytes of a parameter as it is stored, whole."""
        return tensor.size * DTYPE_BYTES[self.stored(tensor)]

    def reduced_bytes(self, tensor: Tensor) -> int:
        """Bytes of the gradient of a parameter as it travels, whole."""
        return tensor.size * DTYPE_BYTES[self.reduced(tensor)]

    @classmethod
    def of(cls, master: str | None, reduce: str | None, *, dtype: str | None) -> Types:
        """What is asked for: beside a 16-bit `dtype` `master` is float32 unless it is given, and `reduce` is as `master`."""
        for name in (master, reduce):
            if name is not None and name not in FLOATS:
                raise UsageError(unknown("dtype", name, FLOATS))
        master = master or ("float32" if dtype in ("float16", "bfloat16") else None)
        return cls(master=master, reduce=reduce or master)

    def within(self, graph: Graph) -> Types:
        """The same, without what changes nothing in this model."""
        trained = [tensor for tensor in graph.parameters if _trained(tensor)]
        master = self.master if any(tensor.dtype != self.master for tensor in trained) else None
        reduce = self.reduce if any(tensor.dtype != self.reduce for tensor in trained) else None
        return Types(master=master, reduce=reduce)

    def require(self, graph: Graph) -> None:
        """Refuse to store what is computed in a type that cannot hold all its values."""
        for tensor in graph.parameters:
            wider = DTYPE_BYTES[self.stored(tensor)] > DTYPE_BYTES[tensor.dtype]
            if self.casts(tensor) and not wider:
                used = f"parameter {tensor.name!r} is used in {tensor.dtype}"
                raise UsageError(f"--master {self.master}: {used}, not all of whose values it can hold")


def _trained(tensor: Tensor) -> bool:
    return tensor.trainable and tensor.dtype in FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """How gradients are brought home, where it is another way than in units of about equal bytes, summed.

    `fused`: sets of parameters, each a unit of its own. `cuts`: the other parameters, in the order in which the backward pass gives their
    gradients, make a unit up to each of these numbers, and one of the rest. `local`: parameters of which every rank has its own, whose
    gradients are not summed. Gradients are multiplied by `weight` and, with `mean`, divided by the number of ranks that share them.
    `formats`: parameters whose gradients travel in another format (`gradient_formats`) where they are summed whole.
    """

    fused: tuple[tuple[str, ...], ...] = ()
    cuts: tuple[int, ...] = ()
    local: tuple[str, ...] = ()
    formats: tuple[tuple[str, str], ...] = ()
    weight: float = 1.0
    mean: bool = False


    def format_of(self, name: str) -> str | None:
        """The format of a parameter's gradient, where it has one of its own."""
        return _by_name(self.formats).get(name) if self.formats else None


@functools.lru_cache(maxsize=16)
def _by_name(formats: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return dict(formats)


PLAINLY = Reductions()
"""In units of equal bytes, summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """`micro_batches`: equal parts of the batch, run one after the other, their gradients added up.

    `recompute`: segments, each the names of operators whose outputs are made again in the backward pass. `gathered`: parameters stored
    split and used whole are "kept" from their first use on (ZeRO 1 and 2) or gathered "again" for the backward pass (ZeRO 3).
    `accumulated`: gradients of kept parameters are added up "whole" and scattered once a step (ZeRO 1), or as "shards" after every
    micro-batch (ZeRO 2). `unit_bytes`: parameters are gathered and their gradients reduced in units of about so many bytes, gathers
    `prefetch` segments ahead. `types`: of stored parameters and of gradients. `reductions`: how these are brought home.
    """

    micro_batches: int = 1
    recompute: tuple[tuple[str, ...], ...] = ()
    gathered: Literal["kept", "again"] = "kept"
    accumulated: Literal["whole", "shards"] = "whole"
    unit_bytes: int = UNIT_BYTES
    prefetch: int = 1
    types: Types = Types()
    reductions: Reductions = PLAINLY

    def reduced(self, tensor: Tensor) -> str:
        """The type in which the gradient of a parameter travels."""
        return type_of(self.reductions.format_of(tensor.name)) or self.types.reduced(tensor)


PLAIN = Schedule()
"""One micro-batch, nothing made or gathered again, one type."""
