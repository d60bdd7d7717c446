"""Losses in micro-batches and pipelines: what is affine in the micro-batches' means equals one
device, what depends on the whole batch is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import UsageError
from tests.end_to_end.beside_one_device import PLANS, planned, wrong

Loss = Callable[[Tensor, Tensor, nn.Module], Tensor]


class Tower(nn.Module):
    """Reads its table of ids by column, so that nothing is cut along the columns."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(12, 8)
        self.hidden = nn.Linear(8, 8)
        self.out = nn.Linear(8, 12)
        self.loss = loss

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of the second column, from the first one."""
        hidden = self.hidden(torch.tanh(self.embedding(ids[:, 0])))
        return self.loss(self.out(torch.relu(hidden)), ids[:, 1], self)


def _regularised(logits: Tensor, target: Tensor, net: nn.Module) -> Tensor:
    weights = sum(p.square().sum() for p in net.parameters())
    return F.cross_entropy(logits, target) + 0.01 * weights


def _normalised(logits: Tensor, target: Tensor, _net: nn.Module) -> Tensor:
    return F.cross_entropy((logits - logits.mean(0)) / (logits.std(0) + 1e-3), target)


def _contrastive(logits: Tensor, _target: Tensor, _net: nn.Module) -> Tensor:
    rows = F.normalize(logits, dim=1)
    return F.cross_entropy(rows @ rows.T, torch.arange(rows.shape[0]))


AFFINE: Mapping[str, Loss] = {
    "0.0 + loss": lambda z, y, _: 0.0 + F.cross_entropy(z, y),
    "1 - mean": lambda z, y, _: 1 - F.softmax(z, -1).gather(1, y[:, None]).mean(),
    "sum of a list": lambda z, y, _: sum([F.cross_entropy(z, y), F.cross_entropy(z * 2, y)]),
    "weighted, with constants": lambda z, y, _: (
        0.3 * F.cross_entropy(z, y) - 0.7 * (z.square().sum() / z.shape[0] + 0.1)
    ),
    "stacked": lambda z, y, _: torch.stack([F.cross_entropy(z, y), z.mean() + 1]).mean(),
    "means of every class": lambda z, y, _: (z.square().mean(0) + 1).sum(),
    "weights decay": _regularised,
    "uncertainty": lambda z, y, net: (
        torch.exp(-net.out.bias[0]) * F.cross_entropy(z, y) + net.out.bias[0]
    ),
}
WHOLE: Mapping[str, tuple[Loss, str]] = {
    "flooding": (lambda z, y, _: (F.cross_entropy(z, y) - 0.1).abs() + 0.1, "'abs'"),
    "normalised over the batch": (_normalised, "'sub'"),
    "contrastive": (_contrastive, "'matmul'"),
    "log of a mean": (lambda z, y, _: z.square().mean().log(), "'log'"),
    "product of means": (lambda z, y, _: (z.mean(0) * z.square().mean(0)).sum(), "'mul'"),
    "rows beside each other": (lambda z, y, _: (z * z.roll(1, 0)).mean(), "'roll'"),
}
IDS = torch.randint(0, 12, (8, 2), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", AFFINE)
def test_a_loss_affine_in_the_means_equals_one_device(name: str) -> None:
    net = Tower(AFFINE[name]).double()
    plans = [planned(net, [IDS], **options) for options in PLANS.values()]
    assert dict(zip(PLANS, wrong(net, [IDS], plans), strict=True)) == {plan: [] for plan in PLANS}


@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_of_the_whole_batch_is_refused_by_name(name: str) -> None:
    loss, operator = WHOLE[name]
    for options in PLANS.values():
        with pytest.raises(UsageError, match=f"{operator} .* depends on the whole batch"):
            planned(Tower(loss).double(), [IDS], **options)


def test_one_micro_batch_runs_what_needs_the_whole_batch() -> None:
    """The refusal says so."""
    net = Tower(WHOLE["flooding"][0]).double()
    with pytest.raises(UsageError, match="only with micro_batches=1"):
        planned(net, [IDS], **PLANS["data, 2 micro-batches"])
    plan = planned(net, [IDS], scheme="data", stages=1, micro_batches=1)
    assert wrong(net, [IDS], [plan]) == [[]]
