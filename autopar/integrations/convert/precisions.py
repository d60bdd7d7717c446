"""Recipes of precision in the words of other projects.

Plans hold one narrow copy of a weight for a step and gather it so. Megatron-LM's layers keep such
a copy over the micro-batches of a step in any case; it gathers it if told to.

Sources: Megatron-LM, megatron/training/arguments.py (--fp8-format, --fp8-recipe, --fp4-format,
--fp8-param-gather); Megatron-Bridge, training/mixed_precision.py; torchtitan 0.2,
components/quantization.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autopar.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A recipe elsewhere.

    `megatron`: its arguments with their values, and `gather`, that with which it gathers narrow
    copies ("": it does not). `bridge`: Megatron-Bridge's `mixed_precision`. `titan`: torchtitan's
    converter, a section of its TOML ("": none), with the `recipes` that mean this one there, and
    the options that are written, of which those that are true let FSDP gather narrow copies.
    """

    megatron: Mapping[str, str]
    bridge: str
    gather: str = ""
    titan: str = ""
    recipes: tuple[str, ...] = ()
    options: tuple[tuple[str, str | bool], ...] = ()

    @property
    def gathers(self) -> tuple[str, ...]:
        """The options of torchtitan with which narrow copies are gathered."""
        return tuple(name for name, value in self.options if value is True)


WORDS: Mapping[str, Words] = {
    "fp8": Words(
        megatron={"fp8-format": "hybrid", "fp8-recipe": "tensorwise"},
        bridge="bf16_with_fp8_current_scaling_mixed",
        gather="fp8-param-gather",
        titan="quantize.linear.float8",
        # Its recipe without a name is the one of these options, and takes no name beside them.
        recipes=("tensorwise",),
        options=(
            ("enable_fsdp_float8_all_gather", True),
            ("precompute_float8_dynamic_scale_for_fsdp", True),
        ),
    ),
    "fp8-block": Words(
        megatron={"fp8-format": "e4m3", "fp8-recipe": "blockwise"},
        bridge="bf16_with_fp8_subchannel_scaling_mixed",
        gather="fp8-param-gather",
    ),
    "mxfp8": Words(
        megatron={"fp8-format": "e4m3", "fp8-recipe": "mxfp8"},
        bridge="bf16_with_mxfp8_mixed",
        titan="quantize.linear.mx",
        recipes=("mxfp8_cublas",),
        options=(("recipe_name", "mxfp8_cublas"),),
    ),
    "nvfp4": Words(
        megatron={"fp4-format": "e2m1", "fp4-recipe": "nvfp4"}, bridge="bf16_with_nvfp4_mixed"
    ),
}
MEGATRON_RECIPES: Mapping[str, str] = {
    "delayed": "fp8",
    **{
        words.megatron["fp8-recipe"]: name
        for name, words in WORDS.items()
        if "fp8-recipe" in words.megatron
    },
}
"""Our recipe for each value of --fp8-recipe."""
SAYING = frozenset({"megatron", "megatron-bridge", "torchtitan"})
"""The targets that know recipes."""


def words_of(plan: Plan) -> Words | None:
    """The words for a plan's recipe, None without one."""
    return WORDS.get(plan.model.precision or "")


def unsaid(plan: Plan, target: str) -> Iterable[str]:
    """A sentence where a target knows no recipe."""
    if words_of(plan) is not None and target not in SAYING:
        yield (
            f"products in {plan.model.precision}: {target} has no words for it, and makes them in "
            "the type of all else"
        )
