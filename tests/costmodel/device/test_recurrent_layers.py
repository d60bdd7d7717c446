"""Recurrent layers are priced by the products of their matrices, whatever their widths."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar


class Tagger(nn.Module):
    """An LSTM in both directions, and scores of what it gives."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.LSTM(width, width, bidirectional=True)
        self.scores = nn.Linear(2 * width, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The scores of every step."""
        scores: torch.Tensor = self.scores(self.layer(x)[0])
        return scores


def seconds(width: int, batch: int) -> float:
    """Seconds of a step."""
    inputs = (torch.zeros(64, batch, width),)
    plan = autopar.plan(Tagger(width), inputs, devices=1, cluster="dgx-h100", proof=False)
    return plan.predicted.forward + plan.predicted.backward


def test_wide_layers_are_priced_as_their_products() -> None:
    """These had been taken for attention with as many samples as weights."""
    narrow = seconds(512, 64)
    wide = seconds(1024, 64)
    flops = 6 * 64 * 64 * 2 * 8 * 1024 * 1024
    assert narrow < wide < 6 * narrow
    assert wide == pytest.approx(flops / 67e12, rel=0.9)
