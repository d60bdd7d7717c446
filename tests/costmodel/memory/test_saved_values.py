"""Values that operators save for the backward pass, with and without recompute."""

from __future__ import annotations

import torch
from torch import nn

from autopar.costmodel.memory.saved_values import saved_values
from autopar.frontends.torch.importer import import_torch
from autopar.sharding.analysis import analyse


class Transposed(nn.Module):
    """A product with a parameter that is transposed first, as banks of experts are."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.empty(16))
        self.weight = nn.Parameter(torch.empty(64, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu((x + self.first) @ self.weight.transpose(0, 1))


def test_recompute_saves_a_parameter_that_is_read_through_a_view() -> None:
    inputs = (torch.empty(32, 16),)
    graph = import_torch(Transposed(), inputs, loss=lambda y, _: y.sum()).graph
    analysis = analyse(graph, train=True)
    segment = tuple(op.name for op in graph.operators if op.kind != "aten.sum.default")
    for segments in ((), (segment,)):
        saved = saved_values(analysis, segments)
        weights = {
            name: [share.nbytes for share in shares if share.weight]
            for name, shares in saved.shares.items()
        }
        taken = {name: bytes_of for name, bytes_of in weights.items() if bytes_of}
        assert list(taken.values()) == [[4.0]], "its one reader bears every element"
        assert saved.weights == {"weight"}
