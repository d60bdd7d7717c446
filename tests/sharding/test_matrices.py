"""Which parameters an optimizer of matrices updates whole."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from autopar.configured import load_any
from autopar.frontends.load import ModelOptions
from autopar.sharding.analysis import analyse
from autopar.sharding.matrices import hidden_matrices
from tests.end_to_end.models import load
from tests.runtime.optimizers.test_optimizers import TOKENS, build


def _matrices(module: nn.Module, *inputs: Tensor) -> set[str]:
    model = load_any(module, ModelOptions(train=True), inputs)
    return set(hidden_matrices(model.graph))


class Residual(nn.Module):
    """A table of positions that is added, a convolution, and a last layer on a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(6, 8))
        self.filter = nn.Conv1d(8, 8, 3, padding=1)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)
        self.still = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.still(self.filter((x + self.positions).transpose(1, 2)).transpose(1, 2))
        output: Tensor = x + self.down(self.up(x).relu())
        return output


def test_tables_heads_and_vectors_are_none() -> None:
    """A tied head is a table; without a head, the last sum has matrices before it alone."""
    assert _matrices(build(), TOKENS) == {"qkv.weight", "out.weight"}
    assert _matrices(Residual(), torch.zeros(2, 6, 8)) == {"up.weight", "down.weight"}
    chain = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    assert _matrices(chain, torch.zeros(2, 8)) == {"0.weight"}


def test_experts_are_batches_of_matrices(tmp_path: object) -> None:
    model = load("mixtral", tmp_path, train=True, dtype="float32")  # type: ignore[arg-type]
    names = hidden_matrices(model.graph)
    assert {name for name in names if len(model.graph.tensors[name].shape) == 3} == {
        f"model.model.layers.{layer}.mlp.experts.{which}_proj"
        for layer in range(2)
        for which in ("gate_up", "down")
    }
    assert not {"model.model.embed_tokens.weight", "model.lm_head.weight"} & names
    assert analyse(model.graph, train=True).matrices == names
    assert not analyse(model.graph, train=False).matrices
