"""Planning in another floating-point type: the caller's module stays as it is, and what runs is of
the wanted type.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import AutoparError, ModelError, NoPlanFits
from autopar.frontends.load import ModelOptions, load_model


class Small(nn.Module):
    """Tied weights, a frozen one, float and integer buffers, and a forward function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 8)
        self.two = nn.Linear(8, 8)
        self.two.weight = self.one.weight
        self.one.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.two(torch.relu(self.one(x)))) + self.shift  # type: ignore[operator, no-any-return]


def state(module: nn.Module) -> dict[str, tuple[Any, ...]]:
    """The state of a module that a caller could see change."""
    tensors = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    return {
        n: (id(t), t.dtype, t.data_ptr(), t._version, t.requires_grad, t.detach().clone().tolist())
        for n, t in tensors.items()
    }


def example() -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


def loss(outputs: Tensor, x: Tensor) -> Tensor:
    return (outputs - x).square().mean()


class Failing(Small):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no")


CALLS: dict[str, tuple[type[Small], Callable[[nn.Module], object], type[Exception] | None]] = {
    "a plan": (
        Small,
        lambda module: autopar.plan(
            module, (example(),), devices=2, cluster="local-cpu", dtype="bfloat16"
        ),
        None,
    ),
    "with a loss": (
        Small,
        lambda module: autopar.plan(
            module, (example(),), devices=2, cluster="local-cpu", dtype="float64", loss=loss
        ),
        None,
    ),
    "an export that fails": (
        Failing,
        lambda module: autopar.plan(module, (example(),), devices=2, dtype="bfloat16"),
        ModelError,
    ),
    "no plan fits": (
        Small,
        lambda module: autopar.plan(
            module, (example(),), devices=2, cluster="local-cpu", dtype="bfloat16", memory=10
        ),
        NoPlanFits,
    ),
    "what runs": (
        Small,
        lambda module: load_model(module, ModelOptions(dtype="bfloat16"), (example(),)).module,
        None,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_module_of_the_caller_stays(name: str) -> None:
    build, call, error = CALLS[name]
    module = build()
    before = state(module)
    attributes = set(vars(module))
    if error is None:
        call(module)
    else:
        with pytest.raises(error):
            call(module)
    assert state(module) == before and set(vars(module)) == attributes


def test_what_runs_has_the_type() -> None:
    module = Small()
    loaded = load_model(module, ModelOptions(dtype="bfloat16"), (example(),))
    floats = {tensor.dtype for tensor in loaded.graph.tensors.values() if tensor.is_float}
    assert floats == {"bfloat16"} and not loaded.graph.tensors["one.bias"].trainable
    twin = loaded.module
    assert twin is loaded.module and twin is not module
    assert twin.one.weight is twin.two.weight and twin.one.weight.dtype == torch.bfloat16
    assert not twin.one.bias.requires_grad and twin.norm.num_batches_tracked.dtype == torch.int64
    assert torch.equal(twin.shift, module.shift.to(torch.bfloat16))
    twin(example().to(torch.bfloat16))
    assert module.norm.num_batches_tracked == 0  # the twin counts its own batches


def test_planning_makes_no_weights() -> None:
    """Weights that no memory holds can be planned in another type: they are never cast."""
    with torch.device("meta"):
        module = nn.Linear(2**20, 2**20)
    loaded = load_model(
        module, ModelOptions(dtype="bfloat16"), (torch.empty(2, 2**20, device="meta"),)
    )
    assert (
        loaded.graph.tensors["weight"].dtype == "bfloat16" and module.weight.dtype == torch.float32
    )


def test_the_same_type_is_the_same_module() -> None:
    module = Small()
    assert load_model(module, ModelOptions(dtype="float32"), (example(),)).module is module
    assert load_model(module, ModelOptions(), (example(),)).module is module


def test_a_plan_of_another_type_runs_in_it() -> None:
    module = Small()
    plan = autopar.plan(module, (example(),), devices=1, cluster="local-cpu", dtype="float64")
    before = state(module)
    planned = autopar.parallelize(module, plan, (example(),))
    chosen = planned(example().double())
    assert chosen.dtype == torch.float64 and {p.dtype for p in planned.parameters()} == {
        torch.float64
    }
    assert state(module) == before
    torch.testing.assert_close(chosen, module.double()(example().double()))


def test_a_module_that_cannot_be_copied_is_told_so() -> None:
    module = Small()
    module.__dict__["handle"] = (line for line in ())  # a generator cannot be copied
    loaded = load_model(module, ModelOptions(dtype="bfloat16"), (example(),))
    with pytest.raises(
        AutoparError, match=r"cannot be copied to run in bfloat16.*module\.to\(torch\.bfloat16\)"
    ):
        _ = loaded.module
