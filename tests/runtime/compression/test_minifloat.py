"""The 16-bit formats against the definition.

Every code, every halfway point, and what lies beyond.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.errors import UsageError
from autopar.runtime.compression import MEAN, VARIANCE, MiniFloat, SmallAdamW

BOTH = pytest.mark.parametrize("form", [MEAN, VARIANCE], ids=str)


def _codes(form: MiniFloat) -> Tensor:
    """Every code without a sign, ascending."""
    count = 2 ** (6 + form.mantissa)
    codes = torch.arange(count, dtype=torch.int32)
    return torch.where(codes >= 2**15, codes - 2**16, codes).to(torch.int16)


@BOTH
def test_every_code_comes_back(form: MiniFloat) -> None:
    codes = _codes(form)
    values = form.decode(codes, torch.float64)
    assert torch.equal(form.encode(values), codes) and torch.equal(
        form.encode(values.float()), codes
    )
    assert bool((values.diff() > 0).all()) and float(values[0]) == 0.0
    assert float(values[-1]) == form.largest and float(values[1]) == form.smallest
    if form.signed:
        assert torch.equal(form.decode(form.encode(-values), torch.float64), -values)


@BOTH
def test_numbers_are_rounded_to_the_nearest_code_and_halves_to_the_even(form: MiniFloat) -> None:
    values = form.decode(_codes(form), torch.float64)
    low = values[:-1]
    high = values[1:]
    gap = high - low
    for share in (0.01, 0.25, 0.49):
        assert torch.equal(form.decode(form.encode(low + share * gap), torch.float64), low)
        assert torch.equal(form.decode(form.encode(high - share * gap), torch.float64), high)
    even = torch.arange(len(low)) % 2 == 0
    assert torch.equal(
        form.decode(form.encode(low + gap / 2), torch.float64), torch.where(even, low, high)
    )


@BOTH
def test_over_the_range_the_error_is_half_a_unit_in_the_last_place(form: MiniFloat) -> None:
    generator = torch.Generator().manual_seed(0)
    power = torch.rand(200_000, generator=generator, dtype=torch.float64) * 61 - 29.5
    values = torch.exp2(power)
    units = torch.exp2(power.floor() - form.mantissa)
    error = (form.decode(form.encode(values), torch.float64) - values).abs()
    assert bool((error <= units / 2).all()) and float((error / units).max()) > 0.49


@BOTH
def test_beyond_the_largest_is_the_largest_and_below_half_the_smallest_is_zero(
    form: MiniFloat,
) -> None:
    values = torch.tensor(
        [form.largest * 2, float("inf"), form.smallest * 0.5, form.smallest * 0.51, 0.0],
        dtype=torch.float64,
    )
    actual = form.decode(form.encode(values), torch.float64).tolist()
    assert actual == [form.largest, form.largest, 0.0, form.smallest, 0.0]
    assert float(form.decode(form.encode(torch.tensor([-3.0])))) == (-3.0 if form.signed else 0.0)


def _train(kind: type[torch.optim.Optimizer], steps: int = 150) -> tuple[float, int]:
    """The loss of a small network after some steps, and the bytes of the optimizer's state."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(128, 16)
    y = torch.randn(128, 8)
    optimizer = kind(module.parameters(), lr=3e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (module(x) - y).square().mean()
        loss.backward()
        optimizer.step()
    state = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    return float((module(x) - y).square().mean().detach()), sum(
        t.numel() * t.element_size() for t in state
    )


def test_training_is_that_of_float32_with_half_the_state() -> None:
    loss, bytes_ = _train(SmallAdamW)
    wanted, before = _train(torch.optim.AdamW)
    assert abs(loss - wanted) <= 0.01 * wanted
    assert bytes_ <= before / 2 + 64


def test_state_survives_a_file_and_a_gradient_that_is_none() -> None:
    value = nn.Parameter(torch.ones(4))
    optimizer = SmallAdamW([value, nn.Parameter(torch.ones(2))], lr=0.1)
    value.grad = torch.tensor([1e-3, 1e3, 0.0, -1.0])
    optimizer.step()
    other = nn.Parameter(value.detach().clone())
    again = SmallAdamW([other, nn.Parameter(torch.ones(2))], lr=0.1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {name: t.dtype for name, t in again.state[other].items() if t.dim()} == {
        "mean": torch.int16,
        "variance": torch.int16,
    }
    other.grad = value.grad.clone()
    optimizer.step()
    again.step()
    assert torch.equal(value, other)
    value.grad = torch.tensor([float("nan"), 1.0, 1.0, 1.0])
    optimizer.step()
    optimizer.step()
    assert not bool(
        torch.isfinite(value.detach()).all()
    )  # as with any AdamW, what is no number does not go away


POWERS = torch.randint(-50, 15, (257,), generator=torch.Generator().manual_seed(9)).double()


def _gradients(step: int, dtype: torch.dtype) -> Tensor:
    """Each element has a size of its own, from 2^-50 to 2^15; some are powers of two, some zero."""
    generator = torch.Generator().manual_seed(step)
    drawn = torch.exp2(POWERS) * torch.randn(257, generator=generator, dtype=torch.float64)
    return (
        torch.where(torch.rand(257, generator=generator) < 0.2, torch.exp2(POWERS), drawn)
        .masked_fill(POWERS % 7 == 0, 0.0)
        .to(dtype)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_numbers_in_a_checkpoint_have_codes_without_another_rounding(dtype: torch.dtype) -> None:
    """The largest is above 2^30 and at most 2^31, so what was rounded up to a power of two keeps
    its power.
    """
    value = nn.Parameter(torch.zeros(257, dtype=dtype))
    optimizer = SmallAdamW([value], lr=0.1)
    for step in range(20):
        value.grad = _gradients(step, dtype)
        optimizer.step()
        state = optimizer.state[value]
        plain = optimizer.plain_state(value, state)
        again = optimizer.plain_state(value, optimizer.own_state(value, plain))
        for name, form in (("mean", MEAN), ("variance", VARIANCE)):
            assert torch.equal(again[name], plain[name]) and not torch.equal(
                plain[name], torch.zeros(257)
            )
            largest = form.decode(state[name]).abs().max()
            assert 2.0**30 <= float(largest) <= 2.0**31
    whole = plain["mean"].float()
    assert float(whole.abs().max() / whole[whole != 0].abs().min()) > 2.0**40


def test_a_largest_number_that_was_rounded_up_keeps_its_power_of_two() -> None:
    """Else what is 2^-70 of it would be rounded once more."""
    value = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    optimizer = SmallAdamW([value])
    moment = torch.tensor([1 - 2.0**-14, 3 * 2.0**-70, -(2.0**-30)], dtype=torch.float64)
    plain = optimizer.plain_state(
        value,
        optimizer.own_state(
            value, {"step": torch.ones(()), "mean": moment, "variance": moment.abs()}
        ),
    )
    assert plain["mean"].tolist() == [1.0, 3 * 2.0**-70, -(2.0**-30)]
    again = optimizer.plain_state(value, optimizer.own_state(value, plain))
    assert torch.equal(again["mean"], plain["mean"]) and torch.equal(
        again["variance"], plain["variance"]
    )


def test_weights_decay_as_in_adamw() -> None:
    ours, theirs = (nn.Parameter(torch.linspace(-2, 2, 9)) for _ in range(2))
    optimizers = (
        SmallAdamW([ours], lr=0.1, weight_decay=0.5),
        torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.5),
    )
    for step in range(8):
        for value, optimizer in zip((ours, theirs), optimizers, strict=True):
            value.grad = torch.sin(torch.arange(9.0) + step)
            optimizer.step()
    assert torch.allclose(ours, theirs, atol=2e-3)


def test_what_would_stand_still_is_refused() -> None:
    with pytest.raises(UsageError, match=r"nearest is 0\.999"):
        autopar.SmallAdamW([nn.Parameter(torch.ones(1))], betas=(0.9, 0.9999))
