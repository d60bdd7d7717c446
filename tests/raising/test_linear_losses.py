"""Cross entropy with the product that makes its scores is one operator, on ranks, too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.errors import UsageError
from autopar.frontends import load
from autopar.frontends.load import ModelOptions, load_model
from autopar.frontends.torch import import_torch
from autopar.ir import Operator
from autopar.ir.stored_products import LINEAR_LOSS
from autopar.runtime.launch import run_ranks
from tests.raising.drawn_plans import drawn_plans_equal

CLASSES = 12
SLOW = (pytest.mark.slow, pytest.mark.ci)
X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, CLASSES, (4, 6), generator=torch.Generator().manual_seed(1))
Y[0, :2] = -100
Loss = Callable[[Tensor, Tensor], Tensor]


class Head(nn.Module):
    """A layer and a head, with a loss of its scores and labels."""

    def __init__(self, loss: Loss, *, bias: bool = False, gives_scores: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=bias)
        self.loss = loss
        self.gives_scores = gives_scores

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """The loss, with scores if asked for."""
        scores = self.head(self.layer(x))
        loss = self.loss(scores, labels)
        return (loss, scores) if self.gives_scores else loss


class WithNone(Head):
    """One that gives nothing beside its loss."""

    def forward(self, x: Tensor, labels: Tensor) -> Any:
        """The loss, and no cache."""
        return super().forward(x, labels), None


def flat(scores: Tensor, labels: Tensor, **given: Any) -> Tensor:
    return functional.cross_entropy(scores.view(-1, CLASSES), labels.view(-1), **given)


def moved(scores: Tensor, labels: Tensor) -> Tensor:
    """As transformers has it: labels are moved by one, and scores in single precision."""
    labels = functional.pad(labels, (0, 1), value=-100)[..., 1:].contiguous()
    scores = scores.float().view(-1, CLASSES)
    return functional.cross_entropy(scores, labels.view(-1).to(scores.device), reduction="sum")


ONE: dict[str, tuple[float, Loss]] = {
    "a mean": (0.0, flat),
    "a sum": (0.0, lambda s, y: flat(s, y, reduction="sum")),
    "another number left out": (0.0, lambda s, y: flat(s, y.clamp(min=0), ignore_index=0)),
    "moved labels": (0.0, moved),
    "a cap": (1.5, lambda s, y: flat((s / 1.5).tanh() * 1.5, y)),
}
OTHERS: dict[str, Loss] = {
    "smoothed": lambda s, y: flat(s, y, label_smoothing=0.1),
    "of each row": lambda s, y: flat(s, y, reduction="none").mean(),
    "scores read twice": lambda s, y: flat(s, y) + s.square().mean(),
    "scaled scores": lambda s, y: flat(s * 2, y),
    "chances for labels": lambda s, y: functional.cross_entropy(
        s.flatten(0, 1), s.new_ones(24, CLASSES) / CLASSES
    ),
}


def compare_alone(module: nn.Module) -> None:
    """The planned loss and its gradients on one device are those of the module."""
    plan = autopar.plan(module, (X, Y), devices=1, cluster="local-cpu", optimizer="sgd")
    planned = autopar.parallelize(copy.deepcopy(module), plan, (X, Y))
    wanted = module(X, Y)
    actual = planned(X, Y)
    torch.testing.assert_close(actual, wanted)
    wanted.backward()
    actual.backward()
    gradients = {name: value.grad for name, value in planned.named_parameters()}
    torch.testing.assert_close(
        gradients, {name: value.grad for name, value in module.named_parameters()}
    )


def losses(module: nn.Module) -> list[Operator]:
    """The losses with products."""
    return [op for op in import_torch(module, (X, Y)).graph.operators if op.kind == LINEAR_LOSS]


@pytest.mark.parametrize("name", ONE)
def test_a_loss_and_its_product_are_one_operator(name: str) -> None:
    cap, loss = ONE[name]
    module = Head(loss)
    (op,) = losses(module)
    assert op.attributes.get("cap", 0.0) == cap
    assert op.inputs[1] == "head.weight"
    compare_alone(module)


@pytest.mark.parametrize("name", OTHERS)
def test_others_stay_as_they_are_written(name: str) -> None:
    module = Head(OTHERS[name])
    assert losses(module) == []
    compare_alone(module)


def test_scores_that_are_given_or_have_a_bias_stay() -> None:
    assert losses(Head(flat, bias=True)) == []
    module = Head(flat, gives_scores=True)
    assert losses(module) == []
    graph = import_torch(module, (X, Y), alone=True).graph
    assert len(graph.outputs) == 1 and graph.operators[-1].kind != "aten.linear.default"
    assert any(op.kind == LINEAR_LOSS for op in graph.operators)


@pytest.mark.parametrize("sizes", [(2,), pytest.param((2, 2), marks=SLOW)])
@pytest.mark.parametrize("name", ["a mean", "moved labels", "a cap"])
def test_drawn_plans_equal_one_device(name: str, sizes: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    module = Head(ONE[name][1]).double()
    given = [X.double(), Y]
    model = import_torch(module, given)
    values: dict[str, Any] = {**dict(module.named_parameters()), **dict(model.constants)}
    values = {key: value.detach() for key, value in values.items()}
    loss = model.graph.outputs[0]
    graph = autopar.ir.with_loss(model.graph)
    assert graph.loss == loss
    drawn_plans_equal(graph, values, given, sizes, plans=8)


def _given(plan: autopar.Plan) -> tuple[float, object]:
    torch.manual_seed(0)
    planned = autopar.parallelize(Head(flat, gives_scores=True), plan, (X, Y))
    loss, scores = planned(X, Y)
    loss.backward()
    return float(loss), scores


def test_a_module_that_is_planned_for_its_loss_alone_gives_none_beside_it() -> None:
    torch.manual_seed(0)
    module = Head(flat, gives_scores=True)
    plan = autopar.plan(module, (X, Y), devices=2, cluster="local-cpu", outputs=("loss",))
    wanted = float(module(X, Y)[0])
    for loss, scores in run_ranks(_given, 2, plan):
        assert loss == pytest.approx(wanted, rel=1e-5) and scores is None


def test_outputs_that_are_held_for_a_step_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "LARGE", 0)
    module = Head(flat, gives_scores=True)
    (told,) = load_model(module, ModelOptions(), (X, Y)).notes
    assert "beside the loss, 1.12 KiB, are held" in told and "--outputs loss" in told
    (told,) = load_model(module, ModelOptions(outputs=("loss",)), (X, Y)).notes
    assert told == load.LEFT_OUT
    assert not load_model(Head(flat), ModelOptions(train=False), (X, Y)).notes
    # None of the module's own is no output that was left out.
    assert not load_model(WithNone(flat), ModelOptions(outputs=("loss",)), (X, Y)).notes
    with pytest.raises(UsageError, match="--outputs loss"):
        load_model(module, ModelOptions(outputs=("scores",)), (X, Y))


def test_an_archive_gives_what_it_was_exported_with(tmp_path: Path) -> None:
    path = tmp_path / "head.pt2"
    torch.export.save(torch.export.export(Head(flat, gives_scores=True), (X, Y)), path)
    with pytest.raises(UsageError, match="returns its loss alone"):
        load_model(path, ModelOptions(outputs=("loss",)))
