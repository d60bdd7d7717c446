"""Arguments with values, on which code builds its shapes, and rows that a batch has all of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import ModelError
from autopar.frontends.torch import import_torch

SIZES = torch.tensor([[2, 3], [1, 2]])


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return torch.cat([self.linear(one) for one in x.tensor_split(ends[:-1].tolist())])


class _Tower(nn.Module):
    """Patches of images of the sizes that it is told, with their places."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.places = nn.Embedding(8, 4)
        self.blocks = nn.ModuleList(_Block() for _ in range(layers))

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        counts = sizes.prod(-1)
        places = torch.cat([torch.arange(n)[torch.arange(n) != 9] for n in counts.tolist()])
        x = x + self.places(places)
        for block in self.blocks:
            x = block(x, counts.cumsum(0))
        return x


class _Told(nn.Module):
    def __init__(self, sizes: Tensor = SIZES) -> None:
        super().__init__()
        self.tower = _Tower(3)
        self.sizes = sizes

    def forward(self, x: Tensor) -> Tensor:
        return self.tower(x, sizes=self.sizes)  # type: ignore[no-any-return]


class _Padded(nn.Module):
    """Images without those that are all zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> list[Tensor]:
        real = (x != 0).any(-1)
        counts = real.view(2, 2).sum(1)
        return list(self.linear(x[real]).split(counts.tolist()))


def test_values_that_are_told_set_shapes_and_are_constants() -> None:
    model = import_torch(_Told(), (torch.randn(8, 4),))
    assert model.graph.tensors[model.graph.outputs[0]].shape == (8, 4)
    assert [list(value.shape) for value in model.constants.values()] == [[8]]
    kinds = {operator.kind for operator in model.graph.operators}
    assert not kinds & {"aten.arange.default", "aten.cumsum.default", "aten.index.Tensor"}


def test_layers_that_are_told_the_same_are_exported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = _Block.forward

    def counted(*args: Any) -> Any:
        # What a pass puts into a list is put back.
        warnings.warn("called", stacklevel=1)
        return forward(*args)

    monkeypatch.setattr(_Block, "forward", counted)
    with pytest.warns(UserWarning, match="called") as told:
        import_torch(_Told(), (torch.randn(8, 4),))
    calls = [one for one in told if str(one.message) == "called"]
    assert len(calls) == 2, "once as part of the model, and once apart"


def test_what_an_input_says_sets_no_shapes() -> None:
    with pytest.raises(ModelError, match="has a size that depends on data"):
        import_torch(_Tower(1), (torch.randn(8, 4), torch.zeros(2, 2, dtype=torch.long)))


def test_a_batch_is_planned_to_have_all_its_rows() -> None:
    model = import_torch(_Padded(), (torch.randn(4, 4),))
    assert [model.graph.tensors[name].shape for name in model.graph.outputs] == [(2, 4), (2, 4)]
    (check,) = model.checks
    assert check.checkable and check.operators[-1].kind == "aten.all.default"
