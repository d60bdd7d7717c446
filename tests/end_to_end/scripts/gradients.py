"""Scripts that do something of their own with gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from tests.end_to_end.scripts.models import batch, pictures
from tests.end_to_end.scripts.steps import (
    adamw,
    gradients,
    sgd,
    step,
    steps,
    trained,
    unsummed,
    weights,
)
from tests.end_to_end.scripts.table import Make, Scripts, Values

SCRIPTS = Scripts("gradients")


@SCRIPTS.script(micro_batches="either")
def autograd_grad(make: Make) -> Values:
    """Gradients as values, whole sums, and a step made of them by hand."""
    module = make()
    parameters = dict(module.named_parameters())
    computed = torch.autograd.grad(module(*batch()), list(parameters.values()))
    for parameter, grad in zip(parameters.values(), computed, strict=True):
        parameter.grad = grad
    values = gradients(module)
    sgd(module.parameters()).step()
    return values | weights(module)


@SCRIPTS.script(micro_batches="either")
def autograd_grad_of_some(make: Make) -> Values:
    """Ask for the gradients of a few parameters only; no other gets one."""
    module = make()
    some = [
        p
        for name, p in module.named_parameters()
        if name.startswith(("norm", "blocks.1.up", "blocks.0.up"))
    ]
    for parameter, grad in zip(some, torch.autograd.grad(module(*batch()), some), strict=True):
        parameter.grad = grad
    return gradients(module)


@SCRIPTS.script()
def inference_before_training(make: Make) -> Values:
    """A look at the validation data comes first, in `inference_mode`, whose tensors autograd does
    not take.
    """
    module = make()
    with torch.inference_mode():
        before = float(module(*batch(8)))
    return {"before": before, **trained(module)}


@SCRIPTS.script(expected="either", micro_batches="left out")
def gradient_penalty(make: Make) -> Values:
    """The norm of the gradients joins the loss."""
    module = make("norms")
    loss = module(*pictures())
    computed = torch.autograd.grad(loss, list(module.parameters()), create_graph=True)
    penalty = sum((grad.square().sum() for grad in computed), torch.zeros((), dtype=torch.float64))
    (loss + 0.1 * penalty).backward()
    return gradients(module)


@SCRIPTS.script()
def optimizer_in_the_backward_pass(make: Make) -> Values:
    """A hook updates every parameter as soon as its gradient is there, and then frees it."""
    module = make()
    optimizers = {parameter: sgd([parameter]) for parameter in module.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    losses: dict[str, Tensor | float] = {}
    for number in range(2):
        loss = module(*batch(number))
        loss.backward()
        losses[f"loss {number}"] = float(loss.detach())
    return losses | weights(module)


@SCRIPTS.script()
def hooks_see_whole_sums_once(make: Make) -> Values:
    """The values that hooks are given after the backward pass, and how often."""
    module = make()
    seen: dict[str, Tensor | float] = {}

    def hook(name: str) -> Callable[[Tensor], None]:
        def see(parameter: Tensor) -> None:
            assert parameter.grad is not None
            squares = parameter.grad.detach().square().sum()
            seen[f"weight squares {name}"] = squares
            seen[f"weight times {name}"] = float(seen.get(f"weight times {name}", 0.0)) + 1.0

        return see

    for name, parameter in module.named_parameters():
        parameter.register_post_accumulate_grad_hook(hook(name))
    module(*batch()).backward()
    full = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in seen.items()
    }
    return full | gradients(module)


@SCRIPTS.script()
def hooks_that_clamp(make: Make) -> Values:
    """The usual remedy for single large gradients: elementwise, so that a share of a sum would be
    another gradient.
    """
    module = make()
    for parameter in module.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))
    return trained(module, optimizer=lambda parameters: sgd(parameters, rate=10.0))


def _accumulated(count: int, summed: str) -> Callable[[Make], Values]:
    """Gradients of several batches add up before a step; `summed`: over the ranks `always`, or in
    the `last` backward pass.
    """

    def run(make: Make) -> Values:
        module = make()
        optimizer = sgd(module.parameters())
        losses: dict[str, Tensor | float] = {}
        for round_ in range(2):
            for number in range(count):
                with unsummed(module) if summed == "last" and number + 1 < count else nullcontext():
                    loss = module(*batch(round_ * count + number)) / count
                    loss.backward()
                losses[f"loss {round_} {number}"] = float(loss.detach())
            if round_ == 0:
                losses |= gradients(module)
            optimizer.step()
            optimizer.zero_grad()
        return losses | weights(module)

    return run


for _count in (2, 3):
    SCRIPTS.add(f"accumulate_{_count}", _accumulated(_count, "always"))
    SCRIPTS.add(f"accumulate_{_count}_unsummed", _accumulated(_count, "last"))


@SCRIPTS.script()
def accumulate_forward_first(make: Make) -> Values:
    """Two forward passes, then one backward pass of both losses."""
    module = make()
    optimizer = sgd(module.parameters())
    loss = module(*batch(0)) + 2.0 * module(*batch(1))
    loss.backward()
    computed = gradients(module)
    optimizer.step()
    return {"loss": float(loss.detach())} | computed | weights(module)


@SCRIPTS.script()
def backward_in_the_other_order(make: Make) -> Values:
    """Two forward passes, then their backward passes, the first one first."""
    module = make()
    first = module(*batch(0))
    second = module(*batch(1))
    first.backward()
    (3.0 * second).backward()
    return {"first": float(first.detach()), "second": float(second.detach())} | gradients(module)


@SCRIPTS.script(micro_batches="either")
def backward_twice(make: Make) -> Values:
    """`retain_graph`, then a step."""
    module = make()
    optimizer = sgd(module.parameters())
    loss = module(*batch())
    loss.backward(retain_graph=True)
    loss.backward()
    computed = gradients(module)
    optimizer.step()
    return computed | weights(module)


@SCRIPTS.script()
def a_loss_that_is_dropped(make: Make) -> Values:
    """A forward pass without its backward pass, between two steps."""
    module = make()
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer)
    dropped = float(module(*batch(8)).detach())
    return losses | {"dropped": dropped} | steps(module, optimizer, start=2) | weights(module)


@SCRIPTS.script()
def a_scaled_loss(make: Make) -> Values:
    """The loss joins a term of its own weights."""
    module = make()
    loss = 3.0 * module(*batch()) + 1.0
    loss.backward()
    return {"loss": float(loss.detach())} | gradients(module)


def _raising(where: str) -> Callable[[Make], Values]:
    """A backward pass raises once, at the loss or at a parameter; what it left is thrown away, and
    ordinary steps follow.
    """

    def run(make: Make) -> Values:
        module = make()
        optimizer = adamw(module.parameters())

        def raises(_: Tensor) -> None:
            raise ZeroDivisionError("once")

        loss = module(*batch(5))
        at = loss if where == "loss" else next(module.parameters())
        handle = at.register_hook(raises)
        try:
            (loss * 2.0).backward()
            caught = 0.0
        except ZeroDivisionError:
            caught = 1.0
        handle.remove()
        optimizer.zero_grad()
        return {"caught": caught} | steps(module, optimizer) | weights(module)

    return run


SCRIPTS.add("backward_raises_at_the_loss", _raising("loss"))
SCRIPTS.add("backward_raises_at_a_parameter", _raising("parameter"))


@SCRIPTS.script()
def parameters_without_a_gradient(make: Make) -> Values:
    """A layer that the forward pass does not use.

    No gradient, no update, not even by weight decay.
    """
    module = make("unused")
    step(module, adamw(module.parameters()), batch())
    return gradients(module) | weights(module)


@SCRIPTS.script()
def frozen_before(make: Make) -> Values:
    """Planned with an embedding and a layer that need no gradient."""
    module = make("frozen")
    return trained(
        module, optimizer=lambda _: adamw([p for p in module.parameters() if p.requires_grad])
    ) | gradients(module)


@SCRIPTS.script()
def frozen_afterwards(make: Make) -> Values:
    """Planned as a whole, then partly frozen, then thawed."""
    module = make()
    optimizer = adamw(module.parameters())
    some = [p for name, p in module.named_parameters() if name.startswith(("embed", "blocks.0"))]
    for parameter in some:
        parameter.requires_grad_(False)
    losses = steps(module, optimizer)
    computed = gradients(module)
    for parameter in some:
        parameter.requires_grad_(True)
    return losses | computed | steps(module, optimizer, start=2) | weights(module)


def _clipped(clip: Callable[[nn.Module], Tensor | None]) -> Callable[[Make], Values]:
    """Gradients are clipped before each of two steps."""

    def run(make: Make) -> Values:
        module = make()
        optimizer = sgd(module.parameters(), rate=1.0)
        results: dict[str, Tensor | float] = {}
        for number in range(2):
            optimizer.zero_grad()
            module(*batch(number)).backward()
            norm = clip(module)
            if norm is not None:
                results[f"norm {number}"] = (
                    norm.full_tensor() if hasattr(norm, "full_tensor") else norm
                )
            optimizer.step()
        return results | weights(module)

    return run


CLIPS: dict[str, Callable[[nn.Module], Tensor | None]] = {
    "clip_norm": lambda module: nn.utils.clip_grad_norm_(module.parameters(), 0.1),
    "clip_norm_foreach": lambda module: nn.utils.clip_grad_norm_(
        module.parameters(), 0.1, foreach=True
    ),
    "clip_largest": lambda module: nn.utils.clip_grad_norm_(
        module.parameters(), 1e-2, norm_type=float("inf")
    ),
    "clip_value": lambda module: nn.utils.clip_grad_value_(module.parameters(), 1e-3),
    "total_norm": lambda module: nn.utils.get_total_norm(
        [p.grad for p in module.parameters() if p.grad is not None]
    ),
}


def _by_the_module(module: nn.Module) -> Tensor:
    """Clipping that knows stages."""
    clip: Callable[..., Tensor] = getattr(
        module, "clip_grad_norm_", lambda norm: nn.utils.clip_grad_norm_(module.parameters(), norm)
    )
    return clip(0.1)


for _name, _clip in CLIPS.items():
    # torch has no norm over parameters of several stages.
    SCRIPTS.add(_name, _clipped(_clip), micro_batches=None if _name == "clip_value" else "either")
SCRIPTS.add("clip_by_the_module", _clipped(_by_the_module))
