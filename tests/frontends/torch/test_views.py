"""An index by counts is read as the view that it is; an index that moves, repeats or leaves out
anything is not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.torch import import_torch
from tests.frontends.torch.test_importer import compare_with_eager

ROWS = 3
COLUMNS = 4
DEPTH = 2


class _Indexed(nn.Module):
    """The indexed input, times a weight."""

    def __init__(self, index: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.index = index
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.index(x) * self.scale


def _rows() -> Tensor:
    return torch.arange(ROWS)


def _columns(start: int = 0) -> Tensor:
    return torch.arange(start, COLUMNS)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "with dims between": lambda x: x[_rows()[:, None, None, None], (_columns() + 0)[None, None, :]],
    "some of the dims": lambda x: x[_rows()[:, None], torch.arange(0, COLUMNS).view(1, COLUMNS)],
    "one dim": lambda x: x[torch.arange(ROWS)],
}
JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "unbound": lambda x: torch.cat(x.unbind()),
    "unbound inside": lambda x: torch.cat(x.unbind(1), dim=-1),
    "split": lambda x: torch.cat(x.split(3, dim=1), dim=-2),
}
MOVED: dict[str, Callable[[Tensor], Tensor]] = {
    "in another order": lambda x: torch.cat(x.unbind()[::-1]),
    "not all": lambda x: torch.cat(x.split(1, dim=1)[1:], dim=1),
    "along another dim": lambda x: torch.cat(x.split(1), dim=1),
    "twice": lambda x: torch.cat(2 * x.unbind()),
}
READS: dict[str, Callable[[Tensor], Tensor]] = {
    "in another order": lambda x: x[_rows()[None, :], _columns()[:, None]],
    "not all": lambda x: x[_rows()[:, None], _columns(1)[None]],
    "moved on": lambda x: x[_rows()[:, None], (_columns() - 1)[None]],
    "on the diagonal": lambda x: x[_rows(), _rows()],
    "by the values of an input": lambda x: x[(x[:, 0, 0] > 0).long()],
}


def _kinds(index: Callable[[Tensor], Tensor]) -> set[str]:
    module = _Indexed(index)
    x = torch.randn(ROWS, COLUMNS, DEPTH, generator=torch.Generator().manual_seed(0))
    compare_with_eager(module, x)
    return {op.kind for op in import_torch(module, (x,)).graph.operators}


@pytest.mark.parametrize("name", VIEWS)
def test_counts_are_a_view(name: str) -> None:
    kinds = _kinds(VIEWS[name])
    assert kinds <= {"aten.mul.Tensor", "aten.reshape.default"}


@pytest.mark.parametrize("name", READS)
def test_other_places_are_read(name: str) -> None:
    assert "aten.index.Tensor" in _kinds(READS[name])


@pytest.mark.parametrize("name", JOINED)
def test_parts_that_are_joined_again_are_a_view(name: str) -> None:
    kinds = _kinds(JOINED[name])
    assert kinds <= {"aten.mul.Tensor", "aten.reshape.default"}


@pytest.mark.parametrize("name", MOVED)
def test_parts_that_are_joined_otherwise_are_moved(name: str) -> None:
    assert "aten.cat.default" in _kinds(MOVED[name])
