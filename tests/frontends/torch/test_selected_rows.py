"""Rows that are added where a mask is true are put in place and added to all."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.torch import import_torch
from tests.frontends.torch.test_importer import compare_with_eager

_Write = Callable[[Tensor, Tensor, Tensor], Tensor]
ADDED: Mapping[str, _Write] = {
    "behind": lambda x, mask, rows: x[mask, :] + rows,
    "before": lambda x, mask, rows: rows + x[mask],
}
OTHER: Mapping[str, _Write] = {
    "twice": lambda x, mask, rows: torch.add(x[mask], rows, alpha=2),
    "rows of another tensor": lambda x, mask, rows: (2 * x)[mask] + rows,
    "no rows of its own": lambda x, mask, rows: rows + rows,
}


class _Writes(nn.Module):
    """A write where tokens are 1."""

    def __init__(self, write: _Write) -> None:
        super().__init__()
        self.write = write
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        x = x.clone()
        mask = tokens == 1
        x[mask, :] = self.write(x, mask, self.weight)
        return x


def _kinds(write: _Write) -> set[str]:
    module = _Writes(write)
    tokens = torch.tensor([[0, 1, 0, 0, 0], [1, 0, 0, 1, 0]])
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    compare_with_eager(module, x, tokens)
    return {op.kind for op in import_torch(module, (x, tokens)).graph.operators}


@pytest.mark.parametrize("name", ADDED)
def test_rows_that_are_added_are_put_in_place(name: str) -> None:
    kinds = _kinds(ADDED[name])
    assert "aten.masked_scatter.default" in kinds and "aten.index_put.default" not in kinds


@pytest.mark.parametrize("name", OTHER)
def test_other_rows_are_written(name: str) -> None:
    assert "aten.index_put.default" in _kinds(OTHER[name])
