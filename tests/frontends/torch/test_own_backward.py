"""Backward passes of a model's own are written out, or refused by name where they would be lost."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.api import plan_loaded
from autopar.errors import ModelError
from autopar.frontends.load import ModelOptions, load_model
from autopar.runtime.import_proof import prove_import
from autopar.runtime.run import run_plan

TRAIN = ModelOptions(train=True)
X = torch.ones(4, 3)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class _Square(torch.autograd.Function):
    """Its backward pass is that of its forward pass times `factor`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.factor = factor
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return 2 * ctx.factor * x * gradient, None


class _Bounded(torch.autograd.Function):
    """Its gradients have bounds that numbers of usual sizes do not reach."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1000, 1000)


class _Scaled(torch.autograd.Function):
    """A function in torch's newer form, of a matrix and a vector of its rows' sizes."""

    @staticmethod
    def forward(x: Tensor, scale: Tensor) -> Tensor:
        return x * scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class _Squared(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Square.apply(self.linear(x), self.factor)  # type: ignore[no-untyped-call]
        scaled: Tensor = _Scaled.apply(out, self.scale)  # type: ignore[no-untyped-call]
        return scaled.mean()


class _Reversed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Reverse.apply(self.linear(x)).square().mean()  # type: ignore[no-untyped-call]
        return out


class _Clipped(_Reversed):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Bounded.apply(self.linear(x)).square().mean()  # type: ignore[no-untyped-call]
        return out


class _Turned(torch.autograd.Function):
    """Its gradients go to other elements."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.flip(-1)


class _Mixed(_Reversed):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = _Turned.apply(self.linear(x)).square().mean()  # type: ignore[no-untyped-call]
        return out


class _Sign(torch.autograd.Function):
    """A straight-through estimator, which passes gradients of small numbers on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sign()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() <= 1)


class _Quantised(_Reversed):
    def forward(self, x: Tensor) -> Tensor:
        signs: Tensor = _Sign.apply(self.linear(x))  # type: ignore[no-untyped-call]
        out: Tensor = signs + x
        return out


class _Checkpointed(_Reversed):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = checkpoint(self.linear, x, use_reentrant=True).square().mean()
        return out


def _is_trained_as_written(module: nn.Module) -> bool:
    """Whether ranks that split the samples have the gradients that the module has."""
    model = load_model(module, TRAIN, (X,))
    plan = plan_loaded(model, devices=2, cluster="local-cpu", mesh=(2,), scheme="data").plan
    return run_plan(model, plan, check=True).ok


@pytest.mark.parametrize(
    ("module", "named"), [(_Clipped(), "_Bounded"), (_Mixed(), "_Turned")], ids=["bound", "turn"]
)
def test_backward_passes_that_do_more_than_scale_are_refused(module: nn.Module, named: str) -> None:
    before = torch.autograd.Function.__dict__["apply"]
    with pytest.raises(ModelError, match=rf"{named} is an autograd.Function with a backward"):
        load_model(module, TRAIN, (X,))
    assert torch.autograd.Function.__dict__["apply"] is before


@pytest.mark.parametrize(
    "module", [_Squared(1.0), _Squared(1.001), _Reversed(), _Quantised()], ids=lambda m: str(m)[:6]
)
def test_what_torch_derives_as_well_and_what_scales_gradients_is_taken(module: nn.Module) -> None:
    """The gradients are those of the own backward pass, which are not those of its forward pass."""
    assert _is_trained_as_written(module)


def test_layers_with_a_backward_of_their_own_are_exported_once() -> None:
    model = load_model(nn.Sequential(*[_Quantised() for _ in range(3)]), TRAIN, (X,))
    assert prove_import(model).proved


def test_without_training_it_has_no_backward() -> None:
    assert load_model(_Reversed(), ModelOptions(train=False), (X,)).graph.operators


def test_torchs_own_functions_are_no_exception() -> None:
    assert load_model(_Checkpointed(), TRAIN, (X.requires_grad_(False),)).graph.operators


@pytest.mark.parametrize("full", [True, False])
def test_hooks_on_gradients_of_submodules_are_refused(*, full: bool) -> None:
    model = _Checkpointed()
    register = (
        model.linear.register_full_backward_hook
        if full
        else model.linear.register_full_backward_pre_hook
    )
    handle = register(lambda *told: None)
    with pytest.raises(ModelError, match="linear has a backward hook"):
        load_model(model, TRAIN, (X,))
    assert load_model(model, ModelOptions(train=False), (X,)).graph.operators
    handle.remove()
    assert load_model(model, TRAIN, (X,)).graph.operators


def test_regions_without_gradients_stay_so_where_writes_are_decomposed() -> None:
    model = nn.utils.parametrizations.spectral_norm(nn.Linear(3, 5)).train()
    graph = load_model(model, TRAIN, (X,)).graph
    stopped = [op.inputs[0] for op in graph.operators if op.kind == "aten.detach.default"]
    assert set(stopped) == set(graph.updates.values()) and len(stopped) == 2
