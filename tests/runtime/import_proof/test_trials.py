"""Trials of models whose rows are no samples are made at the sizes of their example."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.frontends.load import ModelOptions, load_model
from autopar.runtime.import_proof import prove_import

NODES = 12


class _Neighbours(nn.Module):
    """Every node of a graph takes the sum of its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        start, end = edges
        return torch.zeros_like(x).index_add(0, end, self.inner(x)[start])


def test_the_nodes_of_a_graph_are_no_samples_of_which_a_few_would_do() -> None:
    edges = torch.arange(NODES).repeat(2, 3)
    model = load_model(_Neighbours(), ModelOptions(), (torch.randn(NODES, 4), edges))
    proof = prove_import(model)
    assert proof.proved and "at its own sizes" in proof.said


def test_samples_are_left_out_where_they_can_be() -> None:
    model = load_model(nn.Linear(4, 4), ModelOptions(), (torch.randn(NODES, 4),))
    assert "2 samples" in prove_import(model).said


class _Watched(nn.Module):
    """A part that holds a buffer of another one under a second path, and reads it there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.watch = nn.ModuleDict({"norm": self.norm})

    def forward(self, x: Tensor) -> Tensor:
        return self.watch["norm"](x) + self.norm.running_mean  # type: ignore[no-any-return]


def test_buffers_may_have_several_paths() -> None:
    model = load_model(_Watched(), ModelOptions(), (torch.randn(NODES, 4),))
    assert prove_import(model).proved


def test_weights_that_are_computed_before_each_pass() -> None:
    """The older form of `weight_norm` keeps one with a history, which torch does not copy."""
    module = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.ReLU())
    assert prove_import(load_model(module, ModelOptions(), (torch.randn(NODES, 4),))).proved
