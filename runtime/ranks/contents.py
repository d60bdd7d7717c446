"""Digests of tensors, made on the device where each of them is.

    h = sum over i of mix(w_i xor g i), in 64 bits that wrap

    w_i: the bits of element i; g: an odd number; mix: two products, each folded onto its lower bits

Sums of integers have one value in any order, so every device gives the same. They tell mistakes,
such as another seed or checkpoint; nobody is kept from making two tensors alike on purpose. Of a
tensor with more than `SAMPLE` elements about as many are taken, evenly spaced, unless all are
wanted.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor

SAMPLE = 2**16
"""Elements of a tensor that a digest takes at least, or all of fewer."""
DIGEST = 16
"""Bytes of a digest."""
_AT_ONCE = 2**22
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Odd numbers of 64 bits with a sign, those of SplitMix64.
_STEP = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64


class Contents:
    """A digest of facts and of tensors, in their order; `whole`: of all elements."""

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._facts = hashlib.sha256()
        self._sums: dict[torch.device, list[Tensor]] = {}

    def add_fact(self, fact: bytes) -> None:
        """Take bytes into the digest."""
        self._facts.update(fact)

    def add(self, value: Tensor) -> None:
        """Take a tensor into the digest: its shape, its type and the bits of its elements."""
        plain = value.detach()
        self._facts.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
        # Fake tensors, on which plans are tried without memory, have no contents.
        if plain.numel() and type(plain) in (Tensor, torch.nn.Parameter):
            self._sums.setdefault(plain.device, []).append(_sum(plain, whole=self._whole))

    def digest(self) -> bytes:
        """The digest; here the host waits for the devices, once for each."""
        complete = self._facts.copy()
        for sums in self._sums.values():
            complete.update(torch.stack(sums).cpu().numpy().data)
        return complete.digest()[:DIGEST]


def checksum(values: Iterable[Tensor], *, whole: bool = False) -> bytes:
    """A digest of tensors, in their order; `whole`: of all elements."""
    contents = Contents(whole=whole)
    for value in values:
        contents.add(value)
    return contents.digest()


def _sum(value: Tensor, *, whole: bool) -> Tensor:
    """The sum of the mixed elements, an int64 on the tensor's device."""
    if value.is_complex():
        value = torch.view_as_real(value.resolve_conj())
    flat = value.reshape(-1)
    if not whole and len(flat) > SAMPLE:
        # An odd step, so that a matrix of 2^k columns is not sampled in few of them.
        flat = flat[:: len(flat) // SAMPLE | 1]
    words = flat.view(_WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), _AT_ONCE):
        # A copy of numbers of 64 bits, too: it is changed in place.
        part = words[start : start + _AT_ONCE].to(torch.int64, copy=True)
        places = torch.arange(start, start + len(part), device=words.device)
        total += _mixed(part.bitwise_xor_(places.mul_(_STEP))).sum()
    return total


def _mixed(x: Tensor) -> Tensor:
    """Numbers of 64 bits, each bit of which depends on many, in place."""
    x.mul_(_FIRST).bitwise_xor_(x >> 32)
    return x.mul_(_SECOND).bitwise_xor_(x >> 29)
