"""Parts that are written into an empty tensor are read as a join; anything else stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.torch import import_torch
from tests.frontends.torch.test_importer import compare_with_eager


class _Written(nn.Module):
    """Two products whose results are written into one tensor."""

    def __init__(self, write: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.write = write
        self.left = nn.Linear(4, 6)
        self.right = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.left(x), self.right(x)) * 2


def _in_turn(one: Tensor, other: Tensor) -> Tensor:
    made = one.new_empty(*one.shape[:-1], 8)
    made[..., :6] = one
    made[..., 6:] = other
    return made


def _broadcast(one: Tensor, other: Tensor) -> Tensor:
    made = one.new_empty(*one.shape[:-1], 8)
    made[..., :6] = one
    made[..., 6:] = other[:, :1]
    return made


def _over_zeros(one: Tensor, other: Tensor) -> Tensor:
    made = one.new_zeros(*one.shape[:-1], 9)
    made[..., :6] = one
    made[..., 6:8] = other
    return made


def _twice(one: Tensor, other: Tensor) -> Tensor:
    made = one.new_zeros(*one.shape[:-1], 8)
    made[..., :6] = one
    made[..., 4:6] = other
    return made


@pytest.mark.parametrize(
    ("write", "joined"),
    [(_in_turn, True), (_broadcast, True), (_over_zeros, False), (_twice, False)],
)
def test_parts_that_fill_a_tensor(write: Callable[[Tensor, Tensor], Tensor], joined: bool) -> None:
    module = _Written(write)
    x = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0))
    compare_with_eager(module, x)
    kinds = [op.kind for op in import_torch(module, (x,)).graph.operators]
    assert ("aten.cat.default" in kinds) is joined
    assert any("slice_scatter" in kind for kind in kinds) is not joined
