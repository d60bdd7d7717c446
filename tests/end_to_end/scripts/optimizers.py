"""The same loop with the optimizers that there are, and with groups of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from tests.end_to_end.scripts.models import batch
from tests.end_to_end.scripts.steps import adamw, sgd, steps, trained, weights
from tests.end_to_end.scripts.table import Make, Scripts, Values

SCRIPTS = Scripts("optimizers")


class Lamb(Optimizer):
    """Adam's direction, scaled by the ratio of two norms: the parameter's and the direction's."""

    def __init__(self, parameters: Iterable[Tensor], lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["first"] = torch.zeros_like(parameter)
                    state["second"] = torch.zeros_like(parameter)
                state["first"].lerp_(parameter.grad, 0.1)
                state["second"].lerp_(parameter.grad.square(), 0.1)
                direction = state["first"] / (state["second"].sqrt() + 1e-6) + 0.01 * parameter
                ratio = parameter.norm() / (direction.norm() + 1e-6)
                parameter.add_(direction * ratio, alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "sgd_momentum": lambda parameters: torch.optim.SGD(
        parameters, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam_amsgrad": lambda parameters: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True),
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "adamw_one_by_one": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False),
    "adamw_rate_as_a_tensor": lambda parameters: torch.optim.AdamW(
        parameters, lr=torch.tensor(1e-2), foreach=False
    ),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, lr=1e-2),
    "adadelta": lambda parameters: torch.optim.Adadelta(parameters, lr=1.0),
    "adamax": lambda parameters: torch.optim.Adamax(parameters, lr=1e-2),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
    "nadam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "radam": lambda parameters: torch.optim.RAdam(parameters, lr=1e-2),
    "rmsprop": lambda parameters: torch.optim.RMSprop(
        parameters, lr=1e-2, momentum=0.5, centered=True
    ),
    "lamb": Lamb,
}
for _name, _optimizer in OPTIMIZERS.items():

    def _run(make: Make, optimizer: Callable[[Iterable[Tensor]], Optimizer] = _optimizer) -> Values:
        return trained(make(), optimizer=optimizer)

    # torch has no DTensor form of Adafactor's norms of rows and columns.
    SCRIPTS.add(_name, _run, expected="either" if _name == "adafactor" else "equal")


@SCRIPTS.script()
def groups_of_parameters(make: Make) -> Values:
    """Weight decay for matrices only."""
    module = make()
    matrices = [p for p in module.parameters() if p.dim() > 1]
    others = [p for p in module.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return steps(module, torch.optim.AdamW(groups, lr=1e-2)) | weights(module)


@SCRIPTS.script()
def two_optimizers(make: Make) -> Values:
    """One for matrices and one for the others, on one backward pass."""
    module = make()
    first = adamw([p for p in module.parameters() if p.dim() > 1])
    second = sgd([p for p in module.parameters() if p.dim() <= 1])
    results: dict[str, Tensor | float] = {}
    for number in range(2):
        first.zero_grad()
        second.zero_grad()
        loss = module(*batch(number))
        loss.backward()
        first.step()
        second.step()
        results[f"loss {number}"] = float(loss.detach())
    return results | weights(module)


@SCRIPTS.script()
def two_optimizers_in_turn(make: Make) -> Values:
    """Each step updates one half of the parameters."""
    module = make()
    halves = [
        [p for p in module.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)
    ]
    optimizers = [sgd(half) for half in halves]
    results: dict[str, Tensor | float] = {}
    for number in range(4):
        module.zero_grad()
        loss = module(*batch(number))
        loss.backward()
        optimizers[number % 2].step()
        results[f"loss {number}"] = float(loss.detach())
    return results | weights(module)


@SCRIPTS.script()
def a_group_added_later(make: Make) -> Values:
    """Layers are thawed one after the other."""
    module = make()
    optimizer = adamw([p for p in module.parameters() if p.dim() > 1])
    losses = steps(module, optimizer)
    optimizer.add_param_group({"params": [p for p in module.parameters() if p.dim() <= 1]})
    return losses | steps(module, optimizer, start=2) | weights(module)


@SCRIPTS.script()
def two_modules(make: Make) -> Values:
    """Two modules of one plan, under one optimizer, as a student and a critic are."""
    first = make(seed=1)
    second = make(seed=2)
    optimizer = sgd([*first.parameters(), *second.parameters()])
    for number in range(2):
        optimizer.zero_grad()
        loss = first(*batch(number)) + 0.5 * second(*batch(number + 5))
        loss.backward()
        optimizer.step()
    return {"loss": float(loss.detach())} | weights(first, "first ") | weights(second, "second ")
