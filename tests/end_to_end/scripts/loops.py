"""Scripts with the loops of training libraries: scaled losses, schedules, closures, autocast."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import autopar
from tests.end_to_end.scripts.models import KINDS, batch
from tests.end_to_end.scripts.steps import adamw, is_original, sgd, step, steps, weights
from tests.end_to_end.scripts.table import Make, Scripts, Values

SCRIPTS = Scripts("loops")


def _trainer(set_to_none: bool) -> Callable[[Make], Values]:
    """The loop of a library.

    Modes, logging, clipping, a schedule, an evaluation after each epoch.
    """

    def run(make: Make) -> Values:
        module = make()
        optimizer = adamw(module.parameters())
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1.0 / (1 + number))
        results: dict[str, Tensor | float] = {}
        module.zero_grad(set_to_none=set_to_none)
        for number in range(4):
            module.train()
            loss = module(*batch(number)) / 2
            loss.backward()
            results[f"loss {number}"] = loss.item()
            if number % 2:
                nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad(set_to_none=set_to_none)
                module.eval()
                with torch.no_grad():
                    results[f"evaluated {number}"] = module(*batch(9)).item()
        return results | weights(module)

    return run


SCRIPTS.add("a_trainers_loop", _trainer(True))
SCRIPTS.add("a_trainers_loop_with_zeros", _trainer(False))


@SCRIPTS.script()
def zero_grad_before_backward(make: Make) -> Values:
    """Between the forward and the backward pass."""
    module = make()
    optimizer = adamw(module.parameters())
    for number in range(2):
        loss = module(*batch(number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weights(module)


@SCRIPTS.script()
def train_step(make: Make) -> Values:
    """The module's own step."""
    module: Any = make()
    optimizer = adamw(module.parameters())
    if is_original(module):
        losses = steps(module, optimizer)
    else:
        losses = {
            f"loss {number}": float(module.train_step(batch(number), optimizer))
            for number in range(2)
        }
    return losses | weights(module)


@SCRIPTS.script()
def train_step_among_others(make: Make) -> Values:
    """The module's own step between ordinary ones."""
    module: Any = make()
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer)
    if is_original(module):
        losses |= steps(module, optimizer, start=2, count=1)
    else:
        losses["loss 2"] = float(module.train_step(batch(2), optimizer))
    return losses | steps(module, optimizer, start=3) | weights(module)


@SCRIPTS.script()
def the_planned_loss(make: Make) -> Values:
    """`module.loss(...)`."""
    module: Any = make()
    optimizer = adamw(module.parameters())
    results: dict[str, Tensor | float] = {}
    for number in range(2):
        optimizer.zero_grad()
        loss = module(*batch(number)) if is_original(module) else module.loss(*batch(number))
        loss.backward()
        optimizer.step()
        results[f"loss {number}"] = float(loss.detach())
    return results | weights(module)


@SCRIPTS.script()
def states_in_host_memory(make: Make) -> Values:
    """`autopar.host_states` around the optimizer."""
    module = make()
    optimizer = adamw(module.parameters())
    if not is_original(module):
        optimizer = autopar.host_states(optimizer, module)
    return steps(module, optimizer) | weights(module)


@SCRIPTS.script()
def a_closure(make: Make) -> Values:
    """The whole step inside the optimizer's."""
    module = make()
    optimizer = adamw(module.parameters())
    results: dict[str, Tensor | float] = {}
    for number in range(2):

        def closure(number: int = number) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = module(*batch(number))
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        results[f"loss {number}"] = float(optimizer.step(closure).detach())  # type: ignore[arg-type]
    return results | weights(module)


@SCRIPTS.script(expected="either", micro_batches="left out", tolerance=1e-6)
def lbfgs(make: Make) -> Values:
    """The optimizer runs the model several times a step, and looks at all parameters at once."""
    module = make("shallow")
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = module(*batch())
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    loss = optimizer.step(closure)
    return {"loss": float(loss.detach())} | weights(module)


def _scaled(
    kind: str, scale: float, rounds: int, autocast: bool = False
) -> Callable[[Make], Values]:
    """Loss scaling: backward passes of a scaled loss, unscaled before they are clipped; too large a
    scale leaves steps out.
    """

    def run(make: Make) -> Values:
        module = make(kind)
        optimizer = sgd(module.parameters())
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=2)
        results: dict[str, Tensor | float] = {}
        for number in range(rounds):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16, enabled=autocast):
                loss = module(*batch(number))
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            results |= {
                f"loss {number}": float(loss.detach()),
                f"scale {number}": scaler.get_scale(),
            }
        return results | weights(module)

    return run


SCRIPTS.add("a_scaler", _scaled("language32", 1024.0, 3), tolerance=1e-5)
SCRIPTS.add("a_scaler_of_doubles", _scaled("language", 1024.0, 3))
SCRIPTS.add("a_scaler_that_leaves_steps_out", _scaled("language32", 2.0**127, 4), tolerance=1e-5)
SCRIPTS.add(
    "a_scaler_under_autocast", _scaled("language32", 1024.0, 2, autocast=True), tolerance=1e-2
)


@SCRIPTS.script(tolerance=1e-5)
def a_scaled_backward_pass_sees_the_scale(make: Make) -> Values:
    """The scale is in every gradient before it is rounded: hooks inside the pass see scaled values,
    once for each parameter.
    """
    module = make("language32")
    results: dict[str, Tensor | float] = {}

    def see(name: str, grad: Tensor) -> None:
        results[f"weight seen {name}"] = (
            grad.full_tensor() if hasattr(grad, "full_tensor") else grad.clone()
        )
        results[f"weight times {name}"] = float(results.get(f"weight times {name}", 0.0)) + 1.0

    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            parameter.register_hook(functools.partial(see, name))
    torch.amp.GradScaler("cpu", init_scale=4096.0).scale(module(*batch())).backward()  # type: ignore[no-untyped-call]
    return results


@SCRIPTS.script(tolerance=5e-2)
def autocast(make: Make) -> Values:
    """bfloat16 in a float32 model."""
    module = make("language32")
    optimizer = sgd(module.parameters())
    results: dict[str, Tensor | float] = {}
    for number in range(2):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = module(*batch(number))
        loss.backward()
        optimizer.step()
        results[f"loss {number}"] = float(loss.detach())
    return results | weights(module)


def _scheduled(
    make_schedule: Callable[[torch.optim.Optimizer], Any], *, on_loss: bool = False
) -> Callable[[Make], Values]:
    """A learning rate that changes with the steps."""

    def run(make: Make) -> Values:
        module = make()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        schedule = make_schedule(optimizer)
        results: dict[str, Tensor | float] = {}
        for number in range(4):
            loss = step(module, optimizer, batch(number))
            schedule.step(loss) if on_loss else schedule.step()
            results |= {f"loss {number}": loss, f"rate {number}": optimizer.param_groups[0]["lr"]}
        return results | weights(module)

    return run


SCHEDULES = torch.optim.lr_scheduler
SCRIPTS.add(
    "one_cycle",
    _scheduled(lambda optimizer: SCHEDULES.OneCycleLR(optimizer, max_lr=0.5, total_steps=8)),
)
SCRIPTS.add(
    "a_plateau",
    _scheduled(
        lambda optimizer: SCHEDULES.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5),
        on_loss=True,
    ),
)


@SCRIPTS.script()
def from_a_plan_file(make: Make) -> Values:
    """The plainest script there is: a module, the name of a plan's file, a loop."""
    module = make("language, from its file")
    optimizer = adamw(module.parameters())
    return steps(module, optimizer) | weights(module)


@SCRIPTS.script()
def named_arguments(make: Make) -> Values:
    """The batch by name, in another order than it was planned."""
    module = make()
    tokens, targets = batch()
    loss = module(targets=targets, tokens=tokens)
    loss.backward()
    return {"loss": float(loss.detach())} | weights(module)


@SCRIPTS.script()
def a_loop_over_a_data_loader(make: Make) -> Values:
    """Batches of a data loader, two epochs."""
    data = torch.utils.data.TensorDataset(*batch(0, size=2 * len(KINDS["language"].inputs[0])))
    loader = torch.utils.data.DataLoader(data, batch_size=len(KINDS["language"].inputs[0]))
    module = make()
    optimizer = adamw(module.parameters())
    losses = {
        f"loss {epoch} {n}": step(module, optimizer, tuple(part))
        for epoch in range(2)
        for n, part in enumerate(loader)
    }
    return losses | weights(module)
