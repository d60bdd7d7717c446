"""A convolution of which the rows behind the input's are cut off is read as a causal one; any other
stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.frontends.torch import import_torch
from autopar.sharding.rules.windows import CAUSAL
from tests.frontends.torch.test_importer import compare_with_eager

ROWS = 12


class _Cut(nn.Module):
    """A convolution with some of its rows."""

    def __init__(self, cut: Callable[[Tensor], Tensor], padding: int, dilation: int) -> None:
        super().__init__()
        self.cut = cut
        self.conv = nn.Conv1d(4, 4, 3, padding=padding, dilation=dilation, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.cut(self.conv(x)) * 2


CASES: dict[str, tuple[Callable[[Tensor], Tensor], int, int, bool]] = {
    "the first rows": (lambda x: x[..., :ROWS], 2, 1, True),
    "without the last rows": (lambda x: x[:, :, :-2], 2, 1, True),
    "in two readers": (lambda x: x[..., :ROWS] + x[..., :-4].exp(), 4, 2, False),
    "the last rows": (lambda x: x[..., 2:], 2, 1, False),
    "fewer rows": (lambda x: x[..., : ROWS - 1], 2, 1, False),
    "all rows as well": (lambda x: x[..., :ROWS] + x.sum(), 2, 1, False),
    "of a window around each row": (lambda x: x[..., :ROWS], 1, 1, False),
}


@pytest.mark.parametrize("name", CASES)
def test_rows_that_read_themselves_and_those_before(name: str) -> None:
    cut, padding, dilation, causal = CASES[name]
    module = _Cut(cut, padding, dilation)
    x = torch.randn(2, 4, ROWS, generator=torch.Generator().manual_seed(0))
    compare_with_eager(module, x)
    kinds = [op.kind for op in import_torch(module, (x,)).graph.operators]
    assert (CAUSAL in kinds) is causal
    assert causal is ("aten.conv1d.default" not in kinds)
