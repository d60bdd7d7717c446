"""`Schedule`: the order and the number types of a step's work inside one stage."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from autopar.errors import UsageError, unknown
from autopar.ir import DTYPE_BYTES, Graph, Tensor
from autopar.ir.dtype import FLOATS

from .gradient_formats import type_of

UNIT_BYTES = 25 * 2**20
"""25 MiB, as the buckets of torch's DistributedDataParallel (its `bucket_cap_mb`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Types:
    """Floating-point types of trained parameters, where the computation has another type.

    `master`: the type in which they are stored and updated. `reduce`: the type in which their
    gradients travel and are added up. None: the type of the computation.
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
        """Whether a parameter is used in another type than it is stored in, or as a narrow copy."""
        return self.stored(tensor) != tensor.dtype or tensor.narrow is not None

    def cast_bytes(self, tensor: Tensor) -> int:
        """Bytes that a cast of a whole parameter reads and writes.

        A narrow copy whose scales reach over all of it is read for its largest element first.
        """
        whole = tensor.narrow is not None and tensor.shape in tensor.narrow.levels
        return (1 + whole) * self.stored_bytes(tensor) + tensor.bytes

    def stored_bytes(self, tensor: Tensor) -> int:
        """Bytes of a whole parameter in its stored type."""
        return tensor.size * DTYPE_BYTES[self.stored(tensor)]

    def reduced_bytes(self, tensor: Tensor) -> int:
        """Bytes of the gradient of a parameter as it travels, whole."""
        return tensor.size * DTYPE_BYTES[self.reduced(tensor)]

    def wider(self, tensor: Tensor) -> float:
        """Bytes of the gradient for each byte of the value; a parameter may have no elements."""
        return self.reduced_bytes(tensor) / tensor.bytes if tensor.bytes else 1.0

    @classmethod
    def of(cls, master: str | None, reduce: str | None, *, dtype: str | None) -> Types:
        """A request's types: with a 16-bit `dtype`, `master` is float32 by default.

        `reduce` is `master` by default.
        """
        for name in (master, reduce):
            if name is not None and name not in FLOATS:
                raise UsageError(unknown("dtype", name, FLOATS))
        # In 16 bits small updates of large weights are rounded away.
        master = master or ("float32" if dtype in ("float16", "bfloat16") else None)
        return cls(master=master, reduce=reduce or master)

    def within(self, graph: Graph) -> Types:
        """The same types, with None where the model already computes in that type."""
        trained = [tensor for tensor in graph.parameters if _trained(tensor)]
        master = self.master if any(tensor.dtype != self.master for tensor in trained) else None
        reduce = self.reduce if any(tensor.dtype != self.reduce for tensor in trained) else None
        return Types(master=master, reduce=reduce)

    def require(self, graph: Graph) -> None:
        """Raise `UsageError` if a master type cannot hold all values of the computation's type."""
        for tensor in graph.parameters:
            # float16 and bfloat16 are of one width, and neither holds all values of the other.
            wider = DTYPE_BYTES[self.stored(tensor)] > DTYPE_BYTES[tensor.dtype]
            if self.stored(tensor) != tensor.dtype and not wider:
                used = f"parameter {tensor.name!r} is used in {tensor.dtype}"
                raise UsageError(
                    f"--master {self.master}: {used}, not all of whose values it can hold"
                )


def _trained(tensor: Tensor) -> bool:
    return tensor.trainable and tensor.dtype in FLOATS


@dataclass(frozen=True, slots=True, kw_only=True)
class Reductions:
    """The reduction of gradients, where it differs from sums in units of about equal bytes.

    `fused`: sets of parameters whose gradients are reduced as one unit. `cuts`: how many of the
    other parameters, from the last one that is read, lie before each border of units. `local`:
    parameters of which every rank keeps its own gradient. `formats`: (parameter, format) where a
    gradient has a format of its own. `weight`: a factor on all gradients. `mean`: whether sums are
    divided by the number of ranks that share in them.
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


# Asked for every parameter of every unit. `Reductions` holds pairs because a dict has no hash.
@functools.lru_cache(maxsize=16)
def _by_name(formats: tuple[tuple[str, str], ...]) -> Mapping[str, str]:
    return dict(formats)


PLAINLY = Reductions()
"""In units of equal bytes, summed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The order of a step's work inside one stage.

    `micro_batches`: equal parts of the batch, run one after the other, their gradients added up.
    `recompute`: segments, each the names of operators whose outputs are computed again in the
    backward pass. `gathered`: parameters stored split and used whole are gathered once
    "per_step" and stay whole until its end (ZeRO 1 and 2), or once "per_pass", released behind each
    forward and backward pass (ZeRO 3; `reshard_after_forward` in FSDP). `accumulated`: gradients of
    parameters gathered per step are added up "whole" and scattered once a step (ZeRO 1), or added
    up as "shards" after every micro-batch (ZeRO 2). `unit_bytes`: the approximate size of the units
    in which parameters are gathered and their gradients reduced. `prefetch`: the segments between
    two rounds of a gather, and between its last round and the first reader. `types`: the types of
    stored parameters and of gradients. `reductions`: how gradients are reduced. `overlap_experts`:
    each backward pass is merged with the forward pass of another micro-batch, so that exchanges of
    rows of experts in one run under the other.
    """

    micro_batches: int = 1
    recompute: tuple[tuple[str, ...], ...] = ()
    gathered: Literal["per_step", "per_pass"] = "per_step"
    accumulated: Literal["whole", "shards"] = "whole"
    unit_bytes: int = UNIT_BYTES
    prefetch: int = 1
    types: Types = Types()
    reductions: Reductions = PLAINLY
    overlap_experts: bool = False

    @property
    def merges(self) -> bool:
        """Whether passes of two micro-batches are merged."""
        return self.overlap_experts and self.micro_batches > 1

    def reduced(self, tensor: Tensor) -> str:
        """The type in which the gradient of a parameter travels."""
        return type_of(self.reductions.format_of(tensor.name)) or self.types.reduced(tensor)


def zero_stage(gathered: str, accumulated: str) -> int:
    """The ZeRO stage (1, 2 or 3) of how parameters are gathered and their gradients added up."""
    if gathered == "per_pass":
        return 3
    return 2 if accumulated == "shards" else 1


PLAIN = Schedule()
"""One micro-batch, nothing recomputed, parameters gathered once a step, one type."""
