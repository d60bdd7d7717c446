"""Rounding is no difference, and a difference is no rounding: weights under AdamW and SGD."""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.runtime.checking import Observation, differences

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
