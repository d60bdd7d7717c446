"""Buckets of lengths: sequences are padded where the loss does not see the padding.

Packed documents have another number of tokens in every step. A length L is padded to the next
multiple of

    q = max(8, 2 ** (floor(log2 L) - 2))

so that at most a quarter is padding, and an octave has four programs. Whether padding changes
nothing (labels that are ignored, attention that is causal or masked) is not guessed: the first such
batch runs both ways, and its losses must be equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autopar.ir import Graph

_IGNORED = -100
"""The label that torch's losses leave out."""
_LABELS = ("label", "target")
NEAR: Mapping[torch.dtype, float] = {torch.float64: 1e-10, torch.float32: 2e-6}
"""How near two equal losses are, by their type; those of 16 bits tell too little."""

Dims = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """Inputs of a call in their bucket, of `length` before.

    `dims`: the dims of outputs, by name, that have the length.
    """

    inputs: Mapping[str, Tensor]
    length: int
    dims: Dims = field(default_factory=dict)

    def cut_back(self, name: str, value: Tensor) -> Tensor:
        """An output without its padding."""
        for dim in self.dims.get(name, ()):
            value = value.narrow(dim, 0, self.length)
        return value


def bucket_of(length: int) -> int:
    """The padded length of a sequence.

    >>> [bucket_of(length) for length in (5, 100, 1000, 1025)]
    [8, 112, 1024, 1280]
    """
    step = max(8, 1 << max(length.bit_length() - 3, 0))
    return -(-length // step) * step


def padded(graph: Graph, inputs: Mapping[str, Tensor]) -> Padded | None:
    """The inputs in their bucket; None where nothing is to be padded, or it is not clear what.

    `graph`: as planned; the dims whose size is another now are those of the sequence.
    """
    pairs = [
        (planned, given)
        for name, value in inputs.items()
        for planned, given in zip(graph.tensors[name].shape[1:], value.shape[1:], strict=True)
    ]
    changed = {pair for pair in pairs if pair[0] != pair[1]}
    if len(changed) != 1:
        return None
    ((planned, length),) = changed
    bucket = bucket_of(length)
    alike = all(given == length for before, given in pairs if before == planned)
    if not alike or bucket == length:
        return None
    made = {name: _padded(name, value, length, bucket) for name, value in inputs.items()}
    known = {name: value for name, value in made.items() if value is not None}
    return Padded(inputs=known, length=length) if len(known) == len(made) else None


def _padded(name: str, value: Tensor, length: int, bucket: int) -> Tensor | None:
    """An input in its bucket; None for floats, of which nobody knows what stands for nothing."""
    dims = [dim for dim, size in enumerate(value.shape) if dim and size == length]
    if not dims:
        return value
    if value.is_floating_point() or value.is_complex():
        return None
    filled = _IGNORED if any(word in name.lower() for word in _LABELS) else 0
    shape = [bucket if dim in dims else size for dim, size in enumerate(value.shape)]
    made = value.new_full(shape, filled)
    made[tuple(slice(size) for size in value.shape)] = value
    return made


def equal_losses(exact: Tensor, other: Tensor) -> bool:
    """Whether a loss is the same with padding as without."""
    near = NEAR.get(exact.dtype)
    if near is None or not torch.isfinite(exact).all():
        return False
    return bool((exact - other).abs() <= near * exact.abs().clamp(min=1e-30))


def padded_dims(exact: Graph, other: Graph) -> Dims:
    """The dims of the outputs that have another size with padding than without."""
    return {
        name: tuple(
            dim
            for dim, size in enumerate(exact.tensors[name].shape)
            if size != other.tensors[name].shape[dim]
        )
        for name in exact.outputs
    }
