"""Recipes of precision in the words of other projects, there and back."""

from __future__ import annotations

import functools
import tomllib

import pytest

import autopar
from autopar.errors import UsageError
from autopar.integrations.convert import TARGETS, Converted, convert
from autopar.integrations.convert.precisions import SAYING, WORDS
from autopar.integrations.importing.megatron import read_megatron
from autopar.integrations.importing.torchtitan import read_torchtitan
from autopar.ir.recipes import RECIPES
from autopar.plan import Plan
from tests.planning.model.narrow_models import blocks, example


@functools.cache
def planned(name: str, scheme: str = "data") -> Plan:
    """A plan that splits the batch alone."""
    return autopar.plan(
        blocks(), example(), devices=2, cluster="dgx-b200", scheme=scheme, precision=name
    )


def test_every_recipe_has_words() -> None:
    assert set(WORDS) == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_megatron_there_and_back(name: str) -> None:
    text = convert(planned(name), "megatron").text
    assert read_megatron(text).precision == name


@pytest.mark.parametrize(
    ("arguments", "name", "told"),
    [
        ("--fp8-format hybrid", "fp8", "--fp8-recipe delayed"),
        ("--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather", "fp8", ""),
        ("--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather", "mxfp8", "in 16 bits"),
        (
            "--fp8-format e4m3 --fp8-recipe blockwise --use-distributed-optimizer",
            "fp8-block",
            "no --fp8-param-gather",
        ),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "mxfp8", ""),
        ("--fp4-format e2m1 --fp4-recipe nvfp4", "nvfp4", ""),
        ("--bf16", None, ""),
    ],
)
def test_arguments_of_megatron(arguments: str, name: str | None, told: str) -> None:
    configuration = read_megatron(f"--micro-batch-size 1 {arguments}")
    assert configuration.precision == name
    assert any(told in sentence for sentence in configuration.lost) == bool(told)


@pytest.mark.parametrize("name", RECIPES)
def test_narrow_copies_are_gathered_there_too(name: str) -> None:
    """Megatron is told where a plan gathers copies of 8 bits; elsewhere it keeps them anyway."""
    gathered = convert(planned(name, "zero3"), "megatron").text
    assert ("--fp8-param-gather" in gathered) == (name in ("fp8", "fp8-block"))
    assert "param-gather" not in convert(planned(name), "megatron").text


def test_torchtitan_gathers_narrow_copies_if_told() -> None:
    data = tomllib.loads(convert_to_toml("fp8").text)
    section = data["quantize"]["linear"]["float8"]
    assert section == {
        "enable_fsdp_float8_all_gather": True,
        "precompute_float8_dynamic_scale_for_fsdp": True,
    }
    assert not any("narrow copies" in sentence for sentence in read_torchtitan(data).lost)
    section["enable_fsdp_float8_all_gather"] = False
    configuration = read_torchtitan(data)
    assert configuration.precision == "fp8"
    assert any("plans gather narrow copies" in sentence for sentence in configuration.lost)


def test_an_unknown_recipe_of_megatron() -> None:
    with pytest.raises(UsageError, match=r"int8.*delayed.*tensorwise.*blockwise.*mxfp8"):
        read_megatron("--micro-batch-size 1 --fp8-format e4m3 --fp8-recipe int8")


@pytest.mark.parametrize("name", RECIPES)
def test_torchtitan_there_and_back(name: str) -> None:
    """In the sections of 0.2; what has no converter there is told, as all is for a function."""
    made = convert_to_toml(name)
    configuration = read_torchtitan(tomllib.loads(made.text))
    assert configuration.precision == (name if WORDS[name].titan else None)
    assert any(("products" in s) for s in made.lost)
    function = convert(planned(name), "torchtitan")
    assert any(f"products in {name}" in sentence for sentence in function.lost)


def convert_to_toml(name: str) -> Converted:
    """The plan as version 0.2 reads it."""
    return convert(planned(name), "torchtitan", "0.2")


def test_converters_of_torchtitan_that_plans_do_not_have() -> None:
    data = {
        "model": {"converters": ["float8", "quantize.grouped_mm.float8"]},
        "quantize": {"linear": {"float8": {"recipe_name": "rowwise"}}},
    }
    configuration = read_torchtitan(data)
    assert configuration.precision is None
    assert any("rowwise" in sentence for sentence in configuration.lost)
    assert any("grouped_mm" in sentence for sentence in configuration.lost)
    assert read_torchtitan({"model": {"converters": ["mx"]}}).precision == "mxfp8"


def test_megatron_bridge() -> None:
    for name, words in WORDS.items():
        text = convert(planned(name), "megatron-bridge").text
        assert f"config.mixed_precision = {words.bridge!r}" in text


@pytest.mark.parametrize("target", sorted(set(TARGETS) - SAYING))
def test_other_targets_tell_what_they_leave_out(target: str) -> None:
    try:
        made = convert(planned("fp8"), target)
    except UsageError:
        pytest.skip(f"{target} has no data parallelism")
    assert any("products in fp8" in sentence for sentence in made.lost)
