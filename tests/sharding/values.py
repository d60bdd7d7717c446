"""Values that sample calls are made of, beside those of `samples`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.proof import Sample, sample
from tests.sharding.samples import n, names


def z(*shape: int) -> Tensor:
    """Complex numbers."""
    return torch.complex(n(*shape), n(*shape))


def spd(*shape: int) -> Tensor:
    """Symmetric matrices whose least eigenvalue is 1 or more, with eigenvalues apart."""
    root = n(*shape, shape[-1])
    return root @ root.mT + torch.diag(torch.arange(1.0, shape[-1] + 1, dtype=torch.float64))


def by_order(kind: str, note: str, *values: Any, **more: Any) -> Sample:
    """A call with its first arguments in their order."""
    return sample(kind, note, **dict(zip(names(kind), values, strict=False)), **more)


def single(case: Sample) -> Sample:
    """A sample of an operator that has no form in double precision, compared in single."""
    return replace(case, tolerance=1e-4)
