"""The sizes at which a rule is looked for: multiples of a unit, equal only where the operator wants them equal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.runtime.discovery.sizes import spread
from autopar.runtime.proof import Sample, sample

Shapes = list[tuple[int, ...]]


def _values(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


SPREAD: dict[str, tuple[Sample, Shapes, Shapes]] = {
    "equal by accident": (
        sample("aten.mm.default", self=_values(4, 4), mat2=_values(4, 4)),
        [(6, 12), (12, 18)], [(8, 12), (12, 16)],
    ),
    "equal by need": (
        sample("aten.hypot.default", self=_values(4, 4), other=_values(4, 4)),
        [(6, 12), (6, 12)], [(8, 12), (8, 12)],
    ),
    "multiples stay": (
        sample("aten.hypot.default", self=_values(6, 12), other=_values(6, 12)),
        [(6, 12), (6, 12)], [(4, 12), (4, 12)],
    ),
    "broadcast": (
        sample("aten.add.Tensor", self=_values(4, 1), other=_values(4, 5)),
        [(12, 6), (12, 6)], [(4, 8), (4, 8)],
    ),
    "no smaller than an offset": (sample("aten.roll.default", self=_values(4, 4), shifts=[7], dims=[0]), [(12, 18)], [(8, 12)]),
    "a size within another": (
        sample("aten.pixel_shuffle.default", self=_values(2, 12, 2, 2), upscale_factor=2),
        [(6, 12, 18, 24)], [(4, 12, 8, 16)],
    ),
    "what cannot be otherwise": (
        sample("aten.view.default", self=_values(5, 7), size=[5, 7]),
        [(5, 7)], [(5, 7)],
    ),
}  # fmt: skip
"""A call, and its shapes in multiples of 6 and of 4."""


@pytest.mark.parametrize("name", SPREAD)
def test_sizes_of_their_own(name: str) -> None:
    case, *wanted = SPREAD[name]
    assert [[tuple(v.shape) for v in spread(case, unit=unit, seed=1).values] for unit in (6, 4)] == wanted
