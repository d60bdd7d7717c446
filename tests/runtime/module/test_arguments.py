"""Calls of a planned model: optional arguments left out and given, by position and by name, and
what a refusal says.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.func
from torch import Tensor, nn

import autopar
from autopar.errors import PlanError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
MASK = torch.arange(128).view(8, 16) % 3 == 0


class Model(nn.Module):
    """Optional tensors, a switch, a pair, and further keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        scale: float = 1.0,
        pair: tuple[Tensor, Tensor] | None = None,
        **further: Any,
    ) -> Tensor:
        output: Tensor = self.linear(x if mask is None else x * mask) * scale
        return output if pair is None else output + pair[0] * pair[1]


def build() -> Model:
    torch.manual_seed(0)
    return Model()


PLANNED: dict[str, Any] = {
    "x": (X,),
    "x and None": (X, None),
    "x by name and None": {"x": X, "mask": None},
    "a mask": (X, MASK),
    "a mask by name": {"x": X, "mask": MASK},
    "a scale": {"x": X, "scale": 2.0},
    "a pair": {"x": X, "pair": (X, X)},
    "a further one": {"x": X, "use_cache": False},
}
RIGHT: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
    ("x", (X,), {}),
    ("x", (X, None), {}),
    ("x", (), {"x": X, "mask": None, "pair": None}),
    ("x and None", (X,), {}),
    ("x by name and None", (X,), {}),
    ("x by name and None", (), {"x": X, "scale": 1.0}),
    ("a mask", (X,), {"mask": MASK}),
    ("a mask", (), {"mask": MASK, "x": X}),
    ("a mask by name", (X, MASK, 1.0), {}),
    ("a scale", (X, None, 2.0), {}),
    ("a pair", (X, None, 1.0, (X, X)), {}),
    ("a further one", (X,), {"use_cache": False}),
]
WRONG: list[tuple[str, tuple[Any, ...], dict[str, Any], str]] = [
    (
        "x",
        (X, MASK),
        {},
        "'mask' is given as a tensor bool [8, 16], the model was planned with None for it: leave "
        "it out, or plan",
    ),
    (
        "x and None",
        (X,),
        {"mask": MASK},
        "'mask' is given as a tensor bool [8, 16], the model was planned with None for it: leave "
        "it out",
    ),
    (
        "a mask",
        (X,),
        {},
        "'mask' was planned as a tensor bool [8, 16] and is left out: give it so, or plan again "
        "with example inputs",
    ),
    (
        "a mask by name",
        (X, None),
        {},
        "'mask' was planned as a tensor bool [8, 16] and is left out: give it so",
    ),
    ("x", (None,), {}, "'x' was planned as a tensor float32 [8, 16] and is left out"),
    ("a scale", (X,), {}, "'scale' was planned as 2.0 and is left out: give it so"),
    ("x", (X,), {"scale": 3.0}, "'scale' is 3.0, the model was planned with 1.0: give it so"),
    (
        "a pair",
        (X,),
        {"pair": (X,)},
        "'pair' is a tuple of 1 tensor, the model was planned with a tuple of 2 tensors",
    ),
    (
        "x",
        (X,),
        {"use_cache": True},
        "'use_cache' is given as True, the model was planned without it: leave it out",
    ),
    ("a further one", (X,), {}, "'use_cache' was planned as False and is left out"),
    (
        "x",
        ({"x": X},),
        {},
        "'x' is a dict of 1 tensor, which holds the arguments by name: unpack it, module(**batch)",
    ),
    ("x", (X, None, 1.0, None, 5), {}, "too many positional arguments; it takes (x"),
    ("x", (), {}, "missing a required argument: 'x'"),
]


@torch.no_grad()
def _calls(plans: dict[str, Plan]) -> tuple[list[bool], list[str]]:
    modules = {
        name: autopar.parallelize(build(), plan, PLANNED[name]) for name, plan in plans.items()
    }
    same = [
        torch.allclose(modules[name](*args, **kwargs), build()(*args, **kwargs), atol=1e-6)
        for name, args, kwargs in RIGHT
    ]
    messages = []
    for name, args, kwargs, _ in WRONG:
        with pytest.raises(PlanError) as caught:
            modules[name](*args, **kwargs)
        messages.append(str(caught.value))
    return same, messages


@pytest.mark.parametrize("ranks", [1, 2])
def test_calls(ranks: int) -> None:
    plans = {
        name: autopar.plan(build(), call, devices=ranks, cluster="local-cpu")
        for name, call in PLANNED.items()
    }
    for same, messages in run_ranks(_calls, ranks, plans):
        assert same == [True] * len(RIGHT)
        for message, (_, _, _, reason) in zip(messages, WRONG, strict=True):
            assert reason in message


def _transformed() -> list[str]:
    plan = autopar.plan(build(), X, devices=2, cluster="local-cpu")
    transforms: Any = torch.func
    module: Any = autopar.parallelize(build(), plan)
    values = {name: value.detach() for name, value in module.named_parameters()}

    def loss(values: dict[str, Tensor]) -> Tensor:
        result: Tensor = transforms.functional_call(module, values, (X,)).square().mean()
        return result

    said = []
    for call in (
        lambda: transforms.grad(loss)(values),
        lambda: transforms.vmap(lambda row: module(row[None]))(X),
    ):
        with pytest.raises(PlanError) as error:
            call()
        said.append(str(error.value))
    return said


def test_transforms_of_functions_are_refused_on_every_rank() -> None:
    for said in run_ranks(_transformed, 2):
        assert all("do not see into a planned module" in each for each in said)
