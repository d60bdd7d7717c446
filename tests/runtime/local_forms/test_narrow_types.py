"""Tensors rounded to 8 and to 4 bits: the nearest numbers, scales of blocks, what a scale is."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autopar.ir.recipes import RECIPES
from autopar.runtime.local_forms.narrow_products import along_columns, narrow_linear
from autopar.runtime.local_forms.narrow_types import Blocks, largest, narrowed

E2M1 = sorted({sign * n for sign in (-1, 1) for n in (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)})


def values(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in double precision."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def of(value: Tensor, name: str, blocks: Blocks | None = None) -> Tensor:
    """The numbers that a recipe reads instead of values."""
    recipe = RECIPES[name]
    whole = largest(value) if recipe.whole else None
    return narrowed(value, recipe, recipe.values, blocks or along_columns(recipe), whole).wide()


def test_four_bits_are_the_nearest_of_their_sixteen_numbers() -> None:
    """A block whose scale is 1 shows it; ties go to the number with an even mantissa."""
    given = torch.tensor([[6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.0, 0.2, -0.3, 2.4]])
    # The scale of the tensor is such that the block's own, 448, makes 1 of both.
    ours = of(torch.nn.functional.pad(given, (0, 4)), "nvfp4")[:, :12]
    nearest = [6.0, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -4.0, 0.0, -0.5, 2.0]
    assert ours.tolist() == [nearest]
    many = of(values(64, 160), "nvfp4")
    ratios = many / many.abs().unflatten(-1, (-1, 16)).amax(-1).repeat_interleave(16, -1) * 6
    # Blocks whose largest element became 6 have no other numbers than these.
    assert all(min(abs(r - n) for n in (*E2M1, *(x * 1.5 for x in E2M1))) < 1e-9 for r in ratios[0])


@pytest.mark.parametrize(("name", "unit"), [("fp8", 2**-4), ("fp8-block", 2**-4), ("mxfp8", 2**-4)])
def test_eight_bits_are_within_half_a_unit(name: str, unit: float) -> None:
    """A unit of e4m3 is relative to the element, or to the smallest number of its block."""
    given = values(256, 256)
    error = (of(given, name) - given).abs()
    if name == "fp8":
        scale = given.abs().amax() / 448
    else:
        block = RECIPES[name].block
        scale = given.abs().unflatten(-1, (-1, block)).amax(-1).repeat_interleave(block, -1) / 448
    assert bool((error <= torch.maximum(given.abs() * unit, 2 * scale * 2**-10) + 1e-12).all())
    assert float(error.max()) > 0


def test_a_block_knows_nothing_of_others() -> None:
    """One large element spoils its own block alone, but the whole tensor under one scale."""
    given = values(256, 256)
    spoiled = given.clone()
    spoiled[0, 0] = 1e6
    for name, blocks, rest in (
        ("fp8-block", (1, 128), (slice(0, 1), slice(0, 128))),
        ("fp8-block", (128, 1), (slice(0, 128), slice(0, 1))),
        ("fp8-block", (128, 128), (slice(0, 128), slice(0, 128))),
    ):
        changed = of(spoiled, name, blocks) != of(given, name, blocks)
        changed[rest] = False
        assert not changed.any()
    assert (of(spoiled, "fp8") != of(given, "fp8")).float().mean() > 0.9


def test_scales_of_microscaling_are_powers_of_two() -> None:
    recipe = RECIPES["mxfp8"]
    made = narrowed(values(8, 64), recipe, recipe.values, (1, 32))
    mantissa, _ = torch.frexp(made.scales)
    assert made.scales.shape == (8, 2) and bool((mantissa == 0.5).all())
    assert float(made.elements.float().abs().max()) <= 448


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_and_uneven_ends(name: str) -> None:
    """A block of zeros has no scale of zero; the last blocks may be smaller."""
    given = values(130, 200)
    given[:, :130] = 0.0
    ours = of(given, name)
    assert ours.shape == given.shape
    assert bool((ours[:, :130] == 0).all() and torch.isfinite(ours).all())
    assert float((ours - given).norm() / given.norm()) < (0.15 if name == "nvfp4" else 0.05)


@pytest.mark.parametrize(("name", "bytes_each"), [("fp8", 1), ("mxfp8", 1), ("nvfp4", 0.5)])
def test_elements_take_the_bytes_that_are_priced(name: str, bytes_each: float) -> None:
    recipe = RECIPES[name]
    given = values(32, 64)
    whole = largest(given) if recipe.whole else None
    made = narrowed(given, recipe, recipe.values, along_columns(recipe), whole)
    assert made.elements.nbytes == bytes_each * given.numel()


BOUNDS = {"fp8": 0.06, "fp8-block": 0.05, "mxfp8": 0.06, "nvfp4": 0.2}
"""Largest relative error of a product and its gradients, in the norm, beside double precision."""


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("keeps_narrow", [False, True])
def test_products_beside_wide_ones(name: str, keeps_narrow: bool) -> None:
    """Within the bound of the recipe, and further away than those in bfloat16 are."""
    weight = nn.Parameter(values(256, 256, seed=1))
    bias = nn.Parameter(values(256, seed=2))
    x = values(2, 128, 256).requires_grad_()
    out = values(2, 128, 256, seed=3)

    def gradients(y: Tensor) -> list[Tensor]:
        return [y, *torch.autograd.grad(y, (x, weight, bias), out)]

    wide = gradients(nn.functional.linear(x, weight, bias))
    ours = gradients(
        narrow_linear(x, weight, name, (None, None, None), bias, keeps_narrow=keeps_narrow)
    )
    pairs = zip(ours, wide, strict=True)
    errors = [float((a - b).detach().norm() / b.detach().norm()) for a, b in pairs]
    assert all(2**-8 < error < BOUNDS[name] for error in errors[:3]), errors
    assert errors[3] < 1e-6
