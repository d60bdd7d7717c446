"""The formats in which gradients travel: their names, and the ranks of low-rank factors."""

from __future__ import annotations

import pytest

from autopar.errors import UsageError
from autopar.sharding.gradient_formats import check_format, rank_of


@pytest.mark.parametrize(
    ("name", "shape", "rank"),
    [
        ("powersgd-8", (4, 100), 4),
        ("powersgd-2", (8, 3, 3), 2),
        ("powersgd/4", (64, 64), 8),
        ("powersgd/2", (30, 60), 10),
        ("powersgd/64", (8, 8), 0),
        ("powersgd/2", (64,), 0),
        ("bfloat16", (8, 8), 0),
        (None, (8, 8), 0),
    ],
)
def test_ranks_are_those_of_each_matrix(
    name: str | None, shape: tuple[int, ...], rank: int
) -> None:
    assert rank_of(name, shape) == rank


@pytest.mark.parametrize("wrong", ["powersgd", "powersgd-0", "int8", "powersgd-x"])
def test_unknown_formats_are_refused(wrong: str) -> None:
    with pytest.raises(UsageError, match="unknown gradient format"):
        check_format(wrong)
