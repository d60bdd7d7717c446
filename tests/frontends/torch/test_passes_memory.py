"""A forked process that imports a module leaves its parent's memory alone."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

import autopar
from autopar import forking
from autopar.runtime.launch import run_ranks

BIG = 600_000
"""Lists of the parent, each with its counts and links of the garbage collector: 70 MB in all."""


class Scaled(nn.Module):
    """A module with code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).sum() / 2


def _own_bytes() -> int:
    """Bytes of this process that it shares with none."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as lines:
        return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("Private_"))


def _written(plan: autopar.Plan) -> int:
    before = _own_bytes()
    autopar.parallelize(Scaled(), plan, (torch.ones(4, 4),))
    return _own_bytes() - before


@pytest.mark.skipif(sys.platform != "linux", reason="forked pages are counted on Linux")
def test_one_of_many_ranks_copies_no_page_of_its_parent_to_import_a_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forking, "FEW", 1)
    alone = run_ranks(_written, 2, _plan())[0]
    big = [[number] for number in range(BIG)]
    beside = run_ranks(_written, 2, _plan())[0]
    assert len(big) == BIG
    assert beside - alone < 20e6


def _plan() -> autopar.Plan:
    return autopar.plan(Scaled(), (torch.ones(4, 4),), devices=2, cluster="local-cpu")
