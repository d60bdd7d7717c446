"""The proof of a split of time: drawn losses are right or refused, and without the proof wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from autopar.errors import UsageError
from autopar.frontends.load import ModelOptions, load_model
from autopar.order.execution import execution
from autopar.runtime.checking.check import one_device
from autopar.runtime.models.model_values import model_values
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.analysis import Analysis, analyse
from autopar.sharding.layout import B, P
from autopar.sharding.schedule import Schedule
from autopar.sharding.time_split import micro_batch_options
from autopar.sharding.time_walk import TimeWalk

Rows = Tensor
Loss = Callable[[Tensor, nn.Module], Tensor]


class Net(nn.Module):
    """Reads one of two views of each sample, so that the views are no batch."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.hidden = nn.Linear(4, 3)
        self.loss = loss

    def forward(self, x: Tensor) -> Tensor:
        """The loss of the first view."""
        return self.loss(torch.tanh(self.hidden(x[:, 0])), self)


X = torch.randn(4, 2, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _gradients(net: Net) -> list[Tensor]:
    net.zero_grad()
    net(X).backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def _in_micro_batches(net: Net, count: int) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of one rank that runs `count` micro-batches."""
    model = load_model(net, ModelOptions(train=True), (X,))
    analysis = analyse(model.graph, train=True)
    whole = one_device(model.graph, analysis.gradients).assignment
    order = execution(whole, analysis, Schedule(micro_batches=count))
    module = ParallelModule(order, DeviceGroups.single(), model_values(model))
    (loss,) = module(X)
    loss.backward()
    gradients = module.full_values({n: p.grad for n, p in module.graph_parameters().items()})
    return loss.detach(), [gradients[name] for name, _ in net.named_parameters()]


MEANS: dict[str, Loss] = {
    "mean": lambda z, _: z.mean(),
    "mean of squares": lambda z, _: z.square().mean(),
    "sum": lambda z, _: z.sum() / 7,
    "sum of means": lambda z, _: (z.exp().mean(0) + 1).sum(),
    "entropy": lambda z, _: (F.softmax(z, -1) * F.log_softmax(z, -1)).sum(-1).mean(),
}
PENALTIES: dict[str, Loss] = {
    "weights": lambda _, net: net.get_parameter("hidden.weight").square().sum(),
    "bias": lambda _, net: net.get_parameter("hidden.bias").exp().mean(),
}
AFFINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda a, b: a + b,
    "subtract": lambda a, b: a - b,
    "constant": lambda a, b: 0.5 + a + 2 * b,
    "from one": lambda a, b: 1 - a + b / 3,
    "stack": lambda a, b: torch.stack([a, b]).mean(),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
}
OTHERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "product": lambda a, b: a * b,
    "absolute": lambda a, b: (a - b - 0.1).abs(),
    "root": lambda a, b: (a * a + b * b + 1).sqrt(),
    "maximum": torch.maximum,
}


@settings(max_examples=12, deadline=None)
@given(data=st.data())
def test_a_drawn_loss_is_right_or_refused(data: st.DataObject) -> None:
    """A loss that is affine in means is right; one is refused only for a function that is not."""
    values = [
        MEANS[name] for name in data.draw(st.lists(st.sampled_from(sorted(MEANS)), min_size=1))
    ]
    values += [PENALTIES[n] for n in data.draw(st.lists(st.sampled_from(sorted(PENALTIES))))]
    names = [data.draw(st.sampled_from(sorted(AFFINE | OTHERS))) for _ in values[1:]]

    def loss(z: Tensor, net: nn.Module) -> Tensor:
        total = values[0](z, net)
        for name, value in zip(names, values[1:], strict=True):
            total = (AFFINE | OTHERS)[name](total, value(z, net))
        return total

    net = Net(loss).double()
    try:
        actual, gradients = _in_micro_batches(net, data.draw(st.sampled_from([2, 4])))
    except UsageError as error:
        assert "depends on the whole batch" in str(error)
        assert not set(names) <= set(AFFINE), names
        return
    assert torch.allclose(actual, net(X).detach(), rtol=1e-10)
    for mine, theirs in zip(gradients, _gradients(net), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)


def _analysis(loss: Loss) -> Analysis:
    model = load_model(Net(loss).double(), ModelOptions(train=True), (X,))
    return analyse(model.graph, train=True)


def _flooding(z: Tensor, _net: nn.Module) -> Tensor:
    return (z.square().mean() - 0.1).abs() + 0.1


def test_without_the_proof_gradients_count_for_each_micro_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The views pass for a batch: each micro-batch computes all samples, and the loss is right."""
    net = Net(_flooding).double()
    with pytest.raises(UsageError, match=r"'abs' .* depends on the whole batch: it needs 'sub:0'"):
        _in_micro_batches(net, 2)
    monkeypatch.setattr(TimeWalk, "_prove_sum", lambda _: None)
    monkeypatch.setattr(TimeWalk, "_must_be_cut", lambda _, operator: False)
    loss, gradients = _in_micro_batches(net, 2)
    assert torch.allclose(loss, net(X).detach())
    for mine, theirs in zip(gradients, _gradients(net), strict=True):
        assert torch.allclose(mine, 2 * theirs)


@pytest.mark.parametrize("switched_off", ["_prove_sum", "_must_be_cut"])
def test_either_half_of_the_proof_refuses_what_is_not_cut(
    switched_off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TimeWalk, switched_off, lambda *_: None)
    with pytest.raises(UsageError, match="depends on the whole batch"):
        micro_batch_options(_analysis(_flooding))


def test_every_operator_on_samples_is_cut() -> None:
    """A penalty on weights is whole, and the loss the sum of shares."""
    analysis = _analysis(lambda z, net: 1 + z.mean() + PENALTIES["weights"](z, net))
    split = micro_batch_options(analysis)
    assert split.size == 4
    assert split.placements[str(analysis.graph.loss)] == P
    whole = {
        name
        for name, placement in split.placements.items()
        if placement == B and name in analysis.gradients and name not in analysis.graph.parameters
    }
    assert {"square:0", "sum:0"} <= whole and not {"hidden/linear:0", "tanh:0"} & whole


def test_a_loss_of_weights_alone_has_no_micro_batches() -> None:
    with pytest.raises(UsageError, match="the loss is made of no samples"):
        micro_batch_options(_analysis(PENALTIES["weights"]))
