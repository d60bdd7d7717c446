"""Names of schemes that people use, and the schemes that they are."""

from __future__ import annotations

import pytest

from autopar.costmodel import load_cluster
from autopar.errors import UsageError
from autopar.schemes import Factor, scheme_named
from autopar.schemes.recipes import recipe_of, scheme_text, usual_recipes

DATA = Factor(scheme="data", size=8)
SHARDED = Factor(scheme="data", size=8, zero=3)
ONCE = Factor(scheme="data", size=4, zero=1)
TENSOR = Factor(scheme="megatron", size=4)
ROWS = Factor(scheme="megatron-sp", size=4)
STAGES = Factor(scheme="pipeline-1f1b", size=2)


@pytest.mark.parametrize(
    ("factors", "recipe"),
    [
        ([DATA], "DDP"),
        ([SHARDED], "FSDP"),
        ([TENSOR], "TP"),
        ([DATA, TENSOR], "DP8 x TP4"),
        ([SHARDED, ROWS], "FSDP8 x TP4+SP"),
        ([STAGES, DATA, TENSOR], "PP2 x DP8 x TP4"),
        ([STAGES, DATA, SHARDED, TENSOR], "PP2 x HSDP 8x8 x TP4"),
        ([STAGES, DATA, ONCE], "PP2 x HSDP 8x4 ZeRO-1"),
        ([DATA, Factor(scheme="ulysses", size=2)], "DP8 x Ulysses2"),
        ([Factor(scheme="2d", size=16)], "2d 16"),
    ],
)
def test_factors_have_names_that_people_use(factors: list[Factor], recipe: str) -> None:
    assert recipe_of(factors) == recipe


@pytest.mark.parametrize(
    ("recipe", "scheme"),
    [
        ("ddp", "data"),
        ("FSDP", "zero3"),
        ("TP+SP", "megatron-sp"),
        ("EP", "expert"),
        ("TP8 x DP8", "data 8 x megatron 8"),
        ("tp8xdp8", "data 8 x megatron 8"),
        ("TP8 × PP4 × DP2", "pipeline-1f1b 4 x data 2 x megatron 8"),
        ("HSDP 2x8", "data 2 x data 8 (zero3)"),
        ("HSDP 2x8 x TP4+SP", "data 2 x data 8 (zero3) x megatron-sp 4"),
        ("HSDP 2x8 ZeRO-1", "data 2 x data 8 (zero1)"),
        ("PP2 x FSDP8 ZeRO-1 x TP2", "pipeline-1f1b 2 x data 8 (zero1) x megatron 2"),
        ("DP8 ZeRO-1 x TP2", "data 8 (zero1) x megatron 2"),
        ("Ulysses4 x DP2", "data 2 x ulysses 4"),
    ],
)
def test_a_recipe_is_a_scheme(recipe: str, scheme: str) -> None:
    assert scheme_text(recipe) == scheme
    asked = scheme_named(recipe)
    meant = scheme_named(scheme)
    assert (asked.axes, asked.sizes, asked.stages, asked.zero) == (
        meant.axes,
        meant.sizes,
        meant.stages,
        meant.zero,
    )


@pytest.mark.parametrize("text", ["", "x", "TP8 x", "DP8 y TP2", "XP4", "DDP x TP2"])
def test_what_is_no_product_of_degrees(text: str) -> None:
    assert scheme_text(text) is None
    with pytest.raises(UsageError):
        scheme_named(text)


def test_usual_recipes_use_all_devices() -> None:
    recipes = usual_recipes(load_cluster("dgx-h100").sized(64))
    assert recipes[:2] == ["HSDP 8x8", "TP8 x DP8"] and "TP8 x PP2 x DP4" in recipes
    for recipe in recipes:
        scheme = scheme_named(recipe)
        devices = scheme.stages or 1
        for size in scheme.sizes:
            devices *= size
        assert devices == 64
    assert usual_recipes(load_cluster("dgx-h100").sized(1)) == []
