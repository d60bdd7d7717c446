"""Scripts that move, cast or edit a module's weights in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from tests.end_to_end.scripts.steps import adamw, sgd, steps, trained, weights
from tests.end_to_end.scripts.table import Make, Scripts, Values

SCRIPTS = Scripts("moving")


def _before(change: Callable[[nn.Module], object], kind: str) -> Callable[[Make], Values]:
    """The change comes right after the module is made."""

    def run(make: Make) -> Values:
        module = make(kind)
        change(module)
        return trained(module)

    return run


def _between(change: Callable[[nn.Module], object], kind: str) -> Callable[[Make], Values]:
    """The change comes between two steps of one optimizer."""

    def run(make: Make) -> Values:
        module = make(kind)
        optimizer = adamw(module.parameters())
        losses = steps(module, optimizer)
        change(module)
        return losses | steps(module, optimizer, start=2) | weights(module)

    return run


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "to_cpu": lambda module: module.to("cpu"),
    "cpu": lambda module: module.cpu(),
    "to_its_dtype": lambda module: module.to(dtype=torch.float64),
    "double_again": lambda module: module.double(),
    "apply_nothing": lambda module: module._apply(lambda value: value),
    "apply_copies": lambda module: module._apply(torch.clone),
    "requires_grad": lambda module: module.requires_grad_(),
}
"""Calls that leave every value as it is."""
for _name, _move in MOVES.items():
    SCRIPTS.add(_name, _before(_move, "language"))
for _name in ("to_cpu", "apply_copies", "requires_grad"):
    SCRIPTS.add(f"{_name}_between_steps", _between(MOVES[_name], "language"))
SCRIPTS.add("float_again", _before(lambda module: module.float(), "language32"), tolerance=1e-5)
SCRIPTS.add(
    "float_again_between_steps",
    _between(lambda module: module.float(), "language32"),
    tolerance=1e-5,
)
SCRIPTS.add("a_move_with_batch_norms", lambda make: _moved_norms(make), micro_batches="left out")

CASTS: dict[str, tuple[Callable[[nn.Module], object], str, float]] = {
    "cast_to_float": (lambda module: module.float(), "language", 1e-4),
    "cast_to_double": (lambda module: module.double(), "language32", 1e-9),
    "cast_to_half": (lambda module: module.half(), "language32", 3e-2),
    "cast_to_bfloat16": (lambda module: module.bfloat16(), "language32", 1e-1),
}
"""Calls that change the type that the plan is for; with SGD, which does not blow up what is
rounded.
"""
for _name, (_cast, _kind, _tolerance) in CASTS.items():

    def _casted(
        make: Make, cast: Callable[[nn.Module], object] = _cast, kind: str = _kind
    ) -> Values:
        module = make(kind)
        cast(module)
        return trained(module, optimizer=sgd)

    SCRIPTS.add(_name, _casted, expected="either", tolerance=_tolerance)


def _moved_norms(make: Make) -> Values:
    from tests.end_to_end.scripts.models import pictures
    from tests.end_to_end.scripts.steps import buffers

    module = make("norms").to("cpu")
    return {**trained(module, inputs=pictures), **buffers(module)}


@SCRIPTS.script()
def weights_scaled_in_place(make: Make) -> Values:
    """As weights are averaged, pruned or drawn again."""
    module = make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(0.5)
    return trained(module)


@SCRIPTS.script()
def data_scaled_in_place(make: Make) -> Values:
    """The older spelling, between steps."""
    module = make()
    optimizer = adamw(module.parameters())
    losses = steps(module, optimizer)
    for parameter in module.parameters():
        parameter.data.mul_(0.5)
    return losses | steps(module, optimizer, start=2) | weights(module)


@SCRIPTS.script(tolerance=5e-2)
def a_bfloat16_model(make: Make) -> Values:
    """Planned as it is."""
    return trained(make("language16"), optimizer=sgd)


@SCRIPTS.script()
def planning_in_another_dtype(make: Make) -> Values:
    """The caller's module keeps its dtype and its values."""
    import autopar
    from tests.end_to_end.scripts.models import KINDS

    module = KINDS["language"].made(0)
    autopar.plan(module, KINDS["language"].inputs, devices=1, cluster="local-cpu", dtype="bfloat16")
    return trained(module)
