"""Steps of finding a rule: the sizes at which it is looked for, multiples of a unit, equal only
where they must be; how it is written.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.errors import RuleError
from autopar.runtime.discovery.loops import Loop
from autopar.runtime.discovery.rule_notation import rule_text
from autopar.runtime.discovery.size_groups import spread
from autopar.runtime.proof import Sample, sample

Shapes = list[tuple[int, ...]]


def _values(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)


SPREAD: dict[str, tuple[Sample, Shapes, Shapes]] = {
    "equal by accident": (
        sample("aten.mm.default", self=_values(4, 4), mat2=_values(4, 4)),
        [(6, 12), (12, 18)],
        [(8, 12), (12, 16)],
    ),
    "equal by need": (
        sample("aten.hypot.default", self=_values(4, 4), other=_values(4, 4)),
        [(6, 12), (6, 12)],
        [(8, 12), (8, 12)],
    ),
    "multiples stay": (
        sample("aten.hypot.default", self=_values(6, 12), other=_values(6, 12)),
        [(6, 12), (6, 12)],
        [(4, 12), (4, 12)],
    ),
    "broadcast": (
        sample("aten.add.Tensor", self=_values(4, 1), other=_values(4, 5)),
        [(12, 6), (12, 6)],
        [(4, 8), (4, 8)],
    ),
    "no smaller than an offset": (
        sample("aten.roll.default", self=_values(4, 4), shifts=[7], dims=[0]),
        [(12, 18)],
        [(8, 12)],
    ),
    "a size within another": (
        sample("aten.pixel_shuffle.default", self=_values(2, 12, 2, 2), upscale_factor=2),
        [(6, 12, 18, 24)],
        [(4, 12, 8, 16)],
    ),
    "what cannot be otherwise": (
        sample("aten.view.default", self=_values(5, 7), size=[5, 7]),
        [(5, 7)],
        [(5, 7)],
    ),
}
"""A call, and its shapes in multiples of 6 and of 4."""


@pytest.mark.parametrize("name", SPREAD)
def test_sizes_of_their_own(name: str) -> None:
    case, *wanted = SPREAD[name]
    assert [
        [tuple(v.shape) for v in spread(case, unit=unit, seed=1).values] for unit in (6, 4)
    ] == wanted


def _loop(
    size: int,
    given: tuple[int, int] | None,
    made: tuple[int, int] | None,
    reduction: str | None = None,
) -> Loop:
    return Loop(size=size, inputs=(given,), outputs=(made,), reduction=reduction)


SHUFFLE = sample("aten.pixel_shuffle.default", self=_values(2, 12, 6, 10), upscale_factor=2)
WRITTEN: dict[str, tuple[Sample, list[Loop], str]] = {
    "outer and inner parts": (
        SHUFFLE,
        [
            _loop(10, (3, 1), (3, 1)),
            _loop(2, (0, 1), (0, 1)),
            _loop(3, (1, 1), (1, 1)),
            _loop(6, (2, 1), (2, 1)),
        ],
        "a (b 4) c d -> a b (c 2) (d 2)",
    ),
    "what no loop explains": (
        SHUFFLE,
        [_loop(2, (0, 1), (0, 1))],
        "a !w0 !w1 !w2 -> a !w3 !w0 !w4",
    ),
    "parts of parts": (
        sample("aten.glu.default", self=_values(5, 12)),
        [_loop(6, (1, 2), (1, 1))],
        "!w0 (2 a) -> !w0 a",
    ),
    "a kept dim of size 1": (
        sample("aten.sum.dim_IntList", self=_values(5, 4), dim=[1], keepdim=True),
        [_loop(5, (0, 1), (0, 1)), _loop(4, (1, 1), None, "sum")],
        "a b -> a 1 | b: sum",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_loops_are_written_as_they_are_read(name: str) -> None:
    case, loops, text = WRITTEN[name]
    assert rule_text(case, loops) == text


@pytest.mark.parametrize(
    ("loops", "said"),
    [
        (
            [_loop(4, (0, 1), None), _loop(6, (0, 2), None)],
            "two loops overlap in dim 0 of tensor 0",
        ),
        ([_loop(5, (0, 1), None)], "the loops of dim 0 of tensor 0 do not multiply to 12"),
    ],
)
def test_loops_that_do_not_make_up_a_dim(loops: list[Loop], said: str) -> None:
    with pytest.raises(RuleError, match=said):
        rule_text(sample("aten.sum.default", self=_values(12)), loops)
