"""Equal work on equal parts of a tensor is one operator on all of them; other work stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention, unfold

from autopar.frontends.torch import import_torch
from tests.frontends.torch.test_importer import compare_with_eager

TOGETHER: Mapping[str, Callable[[Tensor], Tensor]] = {
    "attention of images": lambda x: torch.cat(
        [
            scaled_dot_product_attention(q, q, q).transpose(1, 2).contiguous()
            for q in x.view(1, 12, 2, 4).transpose(1, 2).split([4, 4, 4], dim=2)
        ],
        dim=1,
    ),
    "patches of images": lambda x: torch.cat(
        [
            unfold(image.view(2, 2, 8).permute(2, 0, 1).unsqueeze(0), 2, stride=2).view(32, -1).t()
            for image in x.split(4)
        ]
    ),
    "a cut of each": lambda x: torch.cat([one[..., 1:3].flatten(1).T for one in x.view(3, 4, 8)]),
    "along another dim": lambda x: torch.cat([one.t() for one in x.chunk(2, 1)], -1),
}
APART: Mapping[str, Callable[[Tensor], Tensor]] = {
    "parts of unequal sizes": lambda x: torch.cat([one.t() for one in x.split([4, 8])], 1),
    "another order": lambda x: torch.cat([one.t() for one in x.split(4)][::-1], 1),
    "not all": lambda x: torch.cat([one.t() for one in x.split(4)][1:], 1),
    "work that differs": lambda x: torch.cat([one[i:].t() for i, one in enumerate(x.split(4))], 1),
    "work without a rule": lambda x: torch.cat([one.cumsum(0) for one in x.split(4)]),
}


class _Works(nn.Module):
    """A function of the input times a weight."""

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.work = work
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.work(x * self.scale)


def _kinds(work: Callable[[Tensor], Tensor]) -> list[str]:
    """The operators of some work; their graph computes what the module does."""
    module = _Works(work)
    x = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    compare_with_eager(module, x)
    return [op.kind for op in import_torch(module, (x,)).graph.operators]


@pytest.mark.parametrize("name", TOGETHER)
def test_equal_work_is_one_operator(name: str) -> None:
    kinds = _kinds(TOGETHER[name])
    assert not {"aten.cat.default", "aten.split.Tensor", "aten.unbind.int"} & set(kinds)
    assert kinds.count("aten.scaled_dot_product_attention.default") <= 1
    assert kinds.count("aten.im2col.default") <= 1


@pytest.mark.parametrize("name", APART)
def test_other_work_stays(name: str) -> None:
    assert "aten.cat.default" in _kinds(APART[name])
