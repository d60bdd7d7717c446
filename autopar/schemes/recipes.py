"""Names of schemes that people use, DDP or TP8 x DP8, beside those of `--scheme`.

A recipe is a product of degrees, the outermost first: pipeline (PP), data (DP, FSDP, with ZeRO),
context (CP, Ulysses), experts (EP), tensor (TP, and TP+SP with sequence parallelism). HSDP RxS has
R replicas of S shards each. FSDP and HSDP gather for every pass (`reshard_after_forward`). With
ZeRO-1 behind the degree parameters are gathered once a step and gradients reduced once, as FSDP2
does in torch's pipelines; with ZeRO-2 gradients are reduced for every micro-batch.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .wording import PRODUCT, Factor

if TYPE_CHECKING:
    from autopar.costmodel import Cluster

WORDS = {
    "data": "DP",
    "megatron": "TP",
    "megatron-sp": "TP",
    "context": "CP",
    "ulysses": "Ulysses",
    "expert": "EP",
}
"""The word before a degree, by scheme; a pipeline's is PP."""
ALONE = {
    "data": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "FSDP",
    "tensor": "TP",
    "megatron": "TP",
    "megatron-sp": "TP+SP",
    "context": "CP",
    "ulysses": "Ulysses",
    "expert": "EP",
}
"""Names of schemes that are given without a degree; the same recipe may be of several."""
OUTERMOST = ("PP", "HSDP", "DP", "FSDP", "CP", "ULYSSES", "EP", "TP", "TP+SP")
_FACTOR = re.compile(
    r"(?P<word>dp|fsdp|tp|pp|cp|ep|ulysses)\s*(?P<size>\d+)"
    r"(?:\s*(?:\+(?P<rows>sp)|zero-?(?P<zero>[123])))?"
    r"|hsdp\s*(?P<replicas>\d+)\s*x\s*(?P<shards>\d+)(?:\s*zero-?(?P<hybrid>[123]))?",
    re.IGNORECASE,
)


def recipe_of(factors: Sequence[Factor]) -> str:
    """The recipe of a plan's factors; what has no word of its own stays as it is called.

    >>> recipe_of([Factor(scheme="data", size=8, zero=1), Factor(scheme="megatron-sp", size=2)])
    'DP8 ZeRO-1 x TP2+SP'
    >>> recipe_of([Factor(scheme="data", size=2), Factor(scheme="data", size=8, zero=3)])
    'HSDP 2x8'
    >>> recipe_of([Factor(scheme="data", size=2), Factor(scheme="data", size=8, zero=1)])
    'HSDP 2x8 ZeRO-1'
    """
    if len(factors) == 1 and factors[0].alone in ALONE:
        return ALONE[factors[0].alone]
    replicas = [f for f in factors if f.scheme == "data" and not f.zero]
    shards = [f for f in factors if f.scheme == "data" and f.zero]
    if len(replicas) == len(shards) == 1:
        zero = shards[0].zero
        hybrid = f"HSDP {replicas[0].size}x{shards[0].size}"
        hybrid += f" ZeRO-{zero}" if zero < 3 else ""
        rest = [_word(f) for f in factors if f not in (*replicas, *shards)]
        # A pipeline is outside of all.
        at = bool(factors[0].scheme.startswith("pipeline-"))
        return PRODUCT.join([*rest[:at], hybrid, *rest[at:]])
    return PRODUCT.join(map(_word, factors))


def _word(factor: Factor) -> str:
    if factor.scheme.startswith("pipeline-"):
        return f"PP{factor.size}"
    if factor.scheme == "data" and factor.zero == 3:
        return f"FSDP{factor.size}"
    if factor.scheme not in WORDS:
        return str(factor)
    rows = "+SP" if factor.scheme == "megatron-sp" else ""
    stored = f" ZeRO-{factor.zero}" if factor.zero else ""
    return f"{WORDS[factor.scheme]}{factor.size}{rows}{stored}"


def scheme_text(recipe: str) -> str | None:
    """The recipe as `--scheme` names it; None if it is no recipe.

    >>> scheme_text("FSDP"), scheme_text("tp8 x pp2 x dp4"), scheme_text("HSDP 2x8")
    ('zero3', 'pipeline-1f1b 2 x data 4 x megatron 8', 'data 2 x data 8 (zero3)')
    """
    alone = {name.lower(): scheme for scheme, name in ALONE.items() if scheme != "tensor"}
    if recipe.lower() in alone:
        return alone[recipe.lower()]
    matches = [_FACTOR.fullmatch(part.strip()) for part in _parts(recipe)]
    factors = [_spelled(match) for match in matches if match]
    if not matches or len(factors) < len(matches):
        return None
    return PRODUCT.join(text for _, text in sorted(factors, key=lambda pair: pair[0]))


def _parts(recipe: str) -> list[str]:
    """The factors of a recipe; the x between the numbers of HSDP parts none."""
    return re.split(r"\s*[×*]\s*|(?<!\d)\s*x\s*|\s+x\s*|\s*x\s*(?!\d)", recipe)


def _spelled(match: re.Match[str]) -> tuple[int, str]:
    """The place of a factor from outside in, and its text."""
    if match["replicas"]:
        zero = match["hybrid"] or "3"
        text = f"data {match['replicas']}{PRODUCT}data {match['shards']} (zero{zero})"
        return OUTERMOST.index("HSDP"), text
    word = match["word"].upper()
    place = OUTERMOST.index(word)
    if word == "PP":
        return place, f"pipeline-1f1b {match['size']}"
    if word == "FSDP":
        return place, f"data {match['size']} (zero{match['zero'] or 3})"
    by_word = {name.upper(): scheme for scheme, name in reversed(WORDS.items())}
    scheme = "megatron-sp" if match["rows"] else by_word[word]
    stored = f" (zero{match['zero']})" if match["zero"] else ""
    return place, f"{scheme} {match['size']}{stored}"


def usual_recipes(cluster: Cluster) -> list[str]:
    """The products that people would try on a cluster, with tensor parallelism inside a node."""
    devices = cluster.devices
    inside = cluster.levels[0].size
    recipes = [] if devices <= inside else [f"HSDP {devices // inside}x{inside}"]
    for tensor in (inside, inside // 2, inside // 4):
        if 1 < tensor < devices and devices % tensor == 0:
            recipes.append(f"TP{tensor} x DP{devices // tensor}")
    tensor = min(inside, devices // 4)
    for stages in (2, 4):
        if tensor > 1 and devices // (stages * tensor) > 1 and devices % (stages * tensor) == 0:
            recipes.append(f"TP{tensor} x PP{stages} x DP{devices // (stages * tensor)}")
    return recipes
