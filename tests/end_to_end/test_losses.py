"""Losses: made outside of the plan, the model's own, or given to the plan; outputs keep their
structure.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.module.parallel_module import ParallelModule
from autopar.runtime.parallelize import parallelize
from tests.end_to_end.models import FLOAT32_INSIDE
from tests.end_to_end.parity import TOLERANCE, failures, subject
from tests.end_to_end.plans import NamedPlans, plans, request
from tests.end_to_end.train_script import batch, build

Gradients = dict[str, Tensor]


def _planned(model: LoadedModel, plan: Plan, outputs: str | None = None) -> ParallelModule:
    """The module of this rank."""
    return parallelize(lambda: (model, plan), outputs=outputs)


def _gradients(module: nn.Module) -> Gradients:
    """The gradients, whole, by name."""
    results = {}
    for name, parameter in module.named_parameters():
        gradient = parameter.grad
        assert gradient is not None, name
        results[name] = (
            (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).detach().clone()
        )
    module.zero_grad()
    return results


def _close(actual: Gradients, expected: Gradients) -> list[str]:
    assert actual.keys() == expected.keys()
    scale = max(float(value.abs().max()) for value in expected.values())
    return [
        name
        for name, value in expected.items()
        if float((actual[name] - value).abs().max()) > 1e-10 * scale
    ]


def _cross_entropy(logits: Tensor) -> Tensor:
    targets = batch(0)[:, 1:].flatten()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=int(targets[0]))


def _mean(logits: Tensor) -> Tensor:
    return (logits * logits).mean() * 3


MADE: Mapping[str, Callable[[Any], Tensor]] = {"cross entropy": _cross_entropy, "mean": _mean}


def _logits_of(model: LoadedModel) -> str:
    """The name of the first output in the graph."""
    assert model.torch is not None
    name = model.torch.output_names[0]
    assert name is not None
    return name


def _outside(
    model: LoadedModel, named: list[tuple[str, Plan]], expected: Mapping[str, Gradients]
) -> list[str]:
    """The errors in the gradients of losses that the caller makes of whole and of split outputs."""
    wrong = []
    for name, plan in named:
        for outputs in ("whole", "split"):
            module = _planned(model, plan, outputs)
            logits = module(batch(0)).logits
            split = plan.outputs[_logits_of(model)].strip("R ") != ""
            assert isinstance(logits, DTensor) == (split and outputs == "split"), (name, outputs)
            for loss, make in MADE.items():
                logits = module(input_ids=batch(0)).logits
                if loss == "mean" and isinstance(logits, DTensor):
                    mean: Any = make(logits)
                    value = mean.full_tensor()
                else:
                    value = make(logits.full_tensor() if isinstance(logits, DTensor) else logits)
                value.backward()
                wrong += [
                    f"{name}, {outputs} outputs, {loss}: {w}"
                    for w in _close(_gradients(module), expected[loss])[:3]
                ]
    return wrong


@pytest.mark.slow
@pytest.mark.ci
def test_losses_made_outside() -> None:
    """Gradients of one device, whichever way the plan leaves the outputs."""
    model = load_model(build(), ModelOptions(), (batch(0),))
    wanted = request((2, 2), train=True)
    named = list(
        {
            plan.outputs[_logits_of(model)]: (name, plan)
            for name, plan in plans(model, wanted, randoms=2)
        }.values()
    )
    assert {plan.outputs[_logits_of(model)] for _, plan in named} >= {"S0 S0"}
    expected = {}
    for loss, make in MADE.items():
        make(model.module(batch(0)).logits).backward()  # type: ignore[no-untyped-call]
        expected[loss] = _gradients(model.module)
    assert run_ranks(_outside, 4, model, named, expected) == [[]] * 4


def test_the_model_computes_its_own_loss(tmp_path: Path) -> None:
    """Labels are inputs, some of them are left out of the mean; its loss is the plan's."""
    model = subject("gpt2_labels", tmp_path, train=True)
    assert model.tolerance == TOLERANCE["float32"] and "gpt2_labels" in FLOAT32_INSIDE
    wanted = request((2,), train=True)
    named = NamedPlans(model.model, wanted)
    assert not failures(
        model, wanted, [(name, named[name]) for name in ("found", "megatron", "data", "random0")]
    )


class Pairs(nn.Module):
    """A module with keyword arguments, flags and a nested dict of outputs; labels serve a loss that
    others make.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(16, 32)
        self.down = nn.Linear(32, 16)

    def forward(
        self, x: Tensor, *, extra: dict[str, Tensor], labels: Tensor, double: bool = False
    ) -> dict[str, Any]:
        """Scores and what is beside them."""
        hidden = torch.tanh(self.up(x)) + extra["shift"]
        scores = self.down(hidden)
        return {"scores": scores * 2 if double else scores, "inner": [hidden, None], "count": 7}


def weighted_loss(
    outputs: dict[str, Any], x: Tensor, *, extra: dict[str, Tensor], labels: Tensor, **_: Any
) -> Tensor:
    """A weighted cross entropy and a mean square error of two of the outputs."""
    weight = torch.linspace(0.5, 2, 16, dtype=torch.float64)
    square = F.mse_loss(outputs["inner"][0], extra["shift"].expand(8, 32))
    weighted = F.cross_entropy(outputs["scores"], labels, weight=weight, label_smoothing=0.1)
    return weighted + F.cross_entropy(outputs["scores"], labels) + square


def _arguments() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(8, 16, generator=draw, dtype=torch.float64)
    shift = torch.randn(32, generator=draw, dtype=torch.float64)
    return {"x": x, "extra": {"shift": shift}, "labels": torch.arange(8), "double": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Seen:
    """The values that a rank sees of a module with a loss that was given to the plan."""

    loss: float
    gradients: Gradients
    kinds: tuple[str, ...]
    count: int
    others: tuple[float, ...]


def _with_given_loss(model: LoadedModel, named: list[tuple[str, Plan]]) -> list[_Seen]:
    results = []
    for _, plan in named:
        module = _planned(model, plan)
        given = _arguments()
        outputs = module(**given)
        kinds = (
            type(outputs["scores"]).__name__,
            type(outputs["inner"][0]).__name__,
            type(outputs["inner"][1]).__name__,
        )
        value = module.loss(given.pop("x"), **dict(reversed(given.items())))
        value.backward()  # type: ignore[no-untyped-call]
        gradients = _gradients(module)
        whole = _planned(model, plan, "whole")(**_arguments())
        others = (whole["scores"].sum().item(), whole["inner"][0].sum().item())
        results.append(
            _Seen(
                loss=value.item(),
                gradients=gradients,
                kinds=kinds,
                count=outputs["count"],
                others=others,
            )
        )
    return results


def test_a_loss_given_to_the_plan() -> None:
    """Keyword arguments in any order, a nested dict of outputs, and a loss function over both."""
    torch.manual_seed(0)
    model = load_model(Pairs().double(), ModelOptions(loss=weighted_loss), _arguments())
    wanted = request((2,), train=True)
    named = list(plans(model, wanted, randoms=4))
    alone = copy.deepcopy(model.module)
    given = _arguments()
    outputs = alone(**given)
    loss = weighted_loss(outputs, **given)
    loss.backward()  # type: ignore[no-untyped-call]
    expected = _gradients(alone)
    results = run_ranks(_with_given_loss, 2, model, named)
    for (name, _), seen in zip(named, results[0], strict=True):
        assert seen.loss == pytest.approx(loss.item(), rel=1e-12), name
        assert not _close(seen.gradients, expected), name
        assert seen.count == 7 and seen.kinds[2] == "NoneType"
        assert seen.others == pytest.approx(
            (outputs["scores"].sum().item(), outputs["inner"][0].sum().item())
        )
    assert {kind for seen in results[0] for kind in seen.kinds[:2]} == {"Tensor", "DTensor"}


def _whole_state(model: LoadedModel, plan: Plan, state: dict[str, Tensor]) -> bool:
    module = _planned(model, plan)
    module.load_state_dict(state)
    return all(
        torch.equal(p.full_tensor() if isinstance(p, DTensor) else p, state[name])
        for name, p in module.state_dict().items()
    )


def test_the_original_state_dict_loads() -> None:
    """Whole tensors are cut into the shards of the plan; buffers and tied names are those of the
    original.
    """
    model = load_model(build(), ModelOptions(), (batch(0),))
    state = build(seed=5).state_dict()
    state["scale"] = state["scale"] * 3
    assert set(state) >= {"head.weight", "embed.weight", "scale"}
    wanted = request((2,), train=True)
    for name in ("megatron", "zero3"):
        plan = NamedPlans(model, wanted)[name]
        assert run_ranks(_whole_state, 2, model, plan, state) == [True, True]
