"""Rounding is no difference, and a difference is no rounding: weights under AdamW and SGD."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from autopar.runtime.checking import Observation, differences
from autopar.runtime.checking.differences import nudged

NOISY = 3e-17
"""A gradient that is zero but for rounding, beside one of about one."""


def observed(noise: float, *, weight: float, gradient: float = 1.0) -> Observation:
    """A run with a weight whose gradient is noise, and one with a gradient of size one."""
    gradients = {"bias": _tensor(noise), "weight": _tensor(gradient)}
    return Observation(
        outputs={},
        losses=(1.0, 1.0, 1.0),
        gradients=gradients,
        smallest={name: value.abs() for name, value in gradients.items()},
        largest={name: value.abs() for name, value in gradients.items()},
        weights={"bias": _tensor(noise * 1e-2), "weight": _tensor(weight)},
    )


def _tensor(value: float) -> Tensor:
    return torch.tensor([value], dtype=torch.float64)


def test_a_weight_that_is_made_of_noise_alone_is_equal_under_sgd() -> None:
    reference = observed(NOISY, weight=1.0)
    assert differences(reference, observed(-NOISY, weight=1.0), optimizer="sgd").passed
    wrong = observed(1e-6, weight=1.0)
    assert not differences(reference, wrong, optimizer="sgd").passed


def test_a_wrong_weight_is_none_of_noise() -> None:
    reference = observed(NOISY, weight=1.0)
    for optimizer in ("sgd", "adamw"):
        report = differences(reference, observed(NOISY, weight=1.001), optimizer=optimizer)
        assert not report.passed and report.worst is not None
        assert report.worst.tensor == "weight"


def test_noise_is_what_the_first_step_shows() -> None:
    """A sum whose terms cancel has more noise than its own size tells: AdamW makes much of it."""
    size = torch.tensor([1.0, 1e-6], dtype=torch.float64)
    other = size + torch.tensor([0.0, 1e-10], dtype=torch.float64)
    pair = []
    for gradient, moved in ((size, 0.0), (other, 1e-4)):
        weights = torch.tensor([1.0, 1.0 + moved], dtype=torch.float64)
        pair.append(
            Observation(
                outputs={},
                losses=(1.0,),
                gradients={"steps": gradient},
                smallest={"steps": gradient},
                largest={"steps": gradient},
                weights={"steps": weights},
            )
        )
    report = differences(pair[0], pair[1], optimizer="adamw")
    assert report.passed and report.excluded == 1
    # Without noise in the first step the same difference of weights is an error.
    still = Observation(
        outputs={},
        losses=(1.0,),
        gradients={"steps": size},
        smallest={"steps": size},
        largest={"steps": size},
        weights=pair[1].weights,
    )
    report = differences(pair[0], still, optimizer="adamw")
    assert not report.passed and not report.excluded


def deep_gradient(weight: Tensor, dtype: torch.dtype) -> Observation:
    """A pass of 20 layers with batch norms of four rows, which makes much of rounding."""
    weight = weight.detach().to(dtype).clone().requires_grad_()
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(4, 64, generator=draw).to(dtype)
    for _ in range(20):
        x = functional.batch_norm(torch.tanh(x @ weight), None, None, training=True)
    loss = (x * torch.randn(4, 64, generator=draw).to(dtype)).mean()
    (gradient,) = torch.autograd.grad(loss, [weight])
    return Observation(
        outputs={},
        losses=(float(loss.detach()),),
        gradients={"weight": gradient.float()},
        smallest={},
        largest={},
        weights={},
    )


def test_a_sensitive_model_has_the_noise_that_its_reference_shows() -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) / 8
    reference = deep_gradient(weight, torch.float32)
    other = deep_gradient(weight, torch.float64)

    def perturbed() -> Observation:
        return deep_gradient(nudged(weight), torch.float32)

    assert not differences(reference, other).passed
    assert differences(reference, other, perturbed=perturbed).passed
    wrong = replace(other, gradients={"weight": other.gradients["weight"] * 1.001})
    assert not differences(reference, wrong, perturbed=perturbed).passed
