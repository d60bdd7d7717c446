"""Splits that communicate inside an operator: classes of a loss, rows of a look-up, rows and experts of a grouped product."""

from __future__ import annotations

import importlib
import itertools

import pytest
import torch

from autopar.runtime.proof import Sample, prove, sample, strategies
from autopar.sharding.rules import RULES, Entry

from .samples import f, ints, n

MESHES = ((2,), (3,), (4,), (2, 2))


def _targets(*shape: int) -> torch.Tensor:
    """Classes below 12, the first left out."""
    found = ints(*shape, high=12)
    if found.numel() > 1:
        found.view(-1)[0] = -100
    return found


LOSSES = [
    sample("aten.cross_entropy_loss.default", self=n(*scores), target=_targets(*rows), reduction=kind, label_smoothing=smooth, **weight)
    for (scores, rows), kind, smooth, weight in itertools.product(
        (((12, 12), (12,)), ((12, 12, 2), (12, 2)), ((12,), ())), (0, 1, 2), (0.0, 0.1), ({}, {"weight": f(12)})
    )
]
LOOK_UPS = [
    sample("aten.index.Tensor", str(places), self=n(12, 4), indices=[torch.tensor(places)])
    for places in (tuple(range(11, -1, -1)), (7,) * 12, (0, 3, 3, -1, 11, 5, -12, 6, 1, 0, 2, 10))
]


def _grouped(*ends: int) -> Sample:
    importlib.import_module("transformers.integrations.moe")
    offsets = torch.tensor(ends, dtype=torch.int32)
    return sample("transformers.grouped_mm_fallback.default", str(ends), input=n(12, 4), weight=n(4, 4, 6), offs=offsets)


@pytest.mark.parametrize("case", LOSSES, ids=str)
def test_losses_with_split_classes(case: Sample) -> None:
    mesh = (2, 2) if case.values[0].dim() > 2 else (3,)
    assert "vocabulary" in {option.communication for option in strategies(case, mesh).options}
    assert prove(case, mesh) > 2


@pytest.mark.parametrize("case", LOOK_UPS, ids=str)
@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_rows_are_looked_up_on_other_ranks(case: Sample, mesh: tuple[int, ...]) -> None:
    assert "dispatch" in {option.communication for option in strategies(case, mesh).options}
    assert prove(case, mesh) > 3


@pytest.mark.parametrize("ends", [(2, 2, 5, 12), (0, 0, 0, 12), (1, 4, 7, 9), (12, 12, 12, 12), (3, 6, 9, 12)])
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)], ids=str)
def test_rows_travel_to_their_experts(ends: tuple[int, ...], mesh: tuple[int, ...]) -> None:
    """Experts without rows, ranks without rows, and rows of no expert among them."""
    case = _grouped(*ends)
    assert {None, "dispatch"} <= {option.communication for option in strategies(case, mesh).options}
    assert prove(case, mesh) > 6


def test_a_communication_that_is_wrong_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that are split without a word would add up rows of the wrong experts."""
    case = _grouped(3, 6, 9, 12)
    monkeypatch.setitem(RULES, case.kind, Entry(rule="t k, e k n, e -> t n | k: sum; e: sum"))
    with pytest.raises(AssertionError):
        prove(case, (2,))
