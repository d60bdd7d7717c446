"""Small copies of a configuration: fewer layers of every kind that it has, and narrower ones.

layers   n -> the least p such that the first p layers have every kind; lists of n are cut alike
experts  at most `EXPERTS`, in at most two groups, of which a token takes at most two
tokens   at most `TOKENS`; marks such as the end of a text become small, and stay distinct
widths   w -> w / f for all keys, so that equal ones stay equal; heads h -> h / f where their size
         is hidden / h, which is then cut_to, and h where the configuration states the size
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from math import gcd
from typing import Any

from autopar.errors import ModelError
from autopar.ir import Graph

from . import diffusion
from .file import File
from .images import PIXELS
from .inputs import batch_of
from .made import Configured
from .modules import made_of, whole_keys
from .sizes import FRAMES, IMAGE, SEQUENCE, Sizes

EXPERTS = 8
TOKENS = 256
WINDOW = 4
"""The most places that a token sees in a trial, where the configuration limits them."""
PATCHES = 4
"""The rows of patches in an image."""
LEAST_WIDTH = 128
"""The least width of a layer, which leaves most types two heads."""
_LAYERS = re.compile(r"^(vt_)?(n_|num_|encoder_|decoder_|depth$).*(layers?|blocks?)$|^depth$")
_NO_LAYERS = re.compile("shared|predict|mask")
_PLACES = re.compile("layer|index|indices")
_EXPERTS = re.compile(r"(^|_)(n|num)_.*experts$|^num_experts$")
_CHOSEN = re.compile(r"experts_per_tok|experts_per_token|moe_topk|top_k_experts|moe_k|topk_group")
_GROUPS = ("n_group", "num_expert_group")
_MARK = re.compile(r"token_ids?$|token_index$|^eo[ia]_|^bo[ia]_")
_WINDOW = re.compile(r"^(sliding_window|attention_chunk_size|index_topk|local_attention)$")
_WIDTH = re.compile(r"(size|dim|rank|width|d_model|d_ff|n_embd|n_inner|d_inner|d_kv)(_|$)")
_NO_WIDTH = re.compile(
    "head|vocab|patch|image|kernel|chunk|window|state|conv|block|position|pool|batch|merge|tile|"
    "sample|channels|rope|axes|crop|group|bucket"
)
_HIDDEN = re.compile(r"^(hidden_size|d_model|n_embd|embed_dim|dim|hidden_dim|inner_dim)$")
_HEADS = re.compile(r"heads?$")
_HEAD_SIZE = re.compile("head_dim|kv_channels|d_kv")

STORED_BYTES = 2**31
"""The most bytes of a copy's parameters."""
SPREAD = 0.02
"""The standard deviation of what is added to the values that a type begins with."""
SAMPLES = 2
LENGTHS = {False: 8, True: 64}
"""The tokens of a sequence without and with an image, whose own tokens it must hold."""
Change = Callable[[str, Any], Any]


def small_files(file: File, graph: Graph) -> Iterator[File]:
    """Configurations of the same type, the smallest first.

    `graph`: a model of the type at its own sizes, which tells the kinds of its layers.
    """
    keys = _fewer_layers(_stated(whole_keys(file)), _stacks(graph))
    fewer = _changed(keys, _fewer(keys))
    if PIXELS in graph.inputs:
        fewer = _smaller_images(fewer)
    factors = {(_factor(fewer, stated=stated), stated) for stated in (True, False)}
    for factor, stated in sorted(factors, reverse=True):
        if factor > 1:
            yield replace(file, keys=_narrower(fewer, factor, stated=stated))
    yield replace(file, keys=fewer)


def drawn(file: File) -> tuple[Configured, Any]:
    """The graph of a configuration, and its module with values; a `ModelError` for large ones.

    No parameter is left at zero, under which a layer tells nothing of those before it.
    """
    import torch

    made = made_of(file, "float32")
    stored = sum(value.nbytes for value in made.module.parameters())
    if stored > STORED_BYTES:
        raise ModelError(f"its small copy has {stored / 2**30:.1f} GiB of parameters, too many")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        module = made.fresh()
        for value in module.parameters():
            value.add_(torch.randn_like(value), alpha=SPREAD)
    return made, module


def small_inputs(model: Configured, names: Collection[str]) -> Mapping[str, Any]:
    """A small batch of a model, with the arguments of these names."""
    vision = getattr(model.config, "vision_config", model.config)
    patch = getattr(vision, "patch_size", None)
    side = getattr(vision, "image_size", None)
    asked = {SEQUENCE: LENGTHS[PIXELS in names]}
    if PIXELS in names and not side and isinstance(patch, int):
        side = 2 * patch * getattr(vision, "spatial_merge_size", 1)
    if PIXELS in names and isinstance(side, int):
        asked[IMAGE] = side
    if model.project == diffusion.PROJECT:
        asked |= {IMAGE: 2 * PATCHES, FRAMES: 2}
    return batch_of(model, SAMPLES, Sizes(asked, ""), labels="labels" in names).given


def _smaller_images(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with images of a few patches, which become as much fewer tokens."""
    sides = [(t["image_size"], t["patch_size"]) for t in _tables(keys) if "image_size" in t]
    ratio = min((PATCHES * p / s for s, p in sides if type(s) is type(p) is int), default=1)

    def cut(key: str, value: Any) -> Any:
        if type(value) is not int or ratio >= 1:
            return value
        if key == "image_size":
            return round(value * ratio)
        return max(1, round(value * ratio**2)) if "tokens_per_image" in key else value

    return _changed(keys, cut)


def _changed(keys: Mapping[str, Any], change: Change) -> dict[str, Any]:
    """The keys with new values, in nested tables too."""
    return {
        key: _changed(value, change) if isinstance(value, dict) else change(key, value)
        for key, value in keys.items()
    }


def _each(keys: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All keys and values, of nested tables too."""
    for key, value in keys.items():
        if isinstance(value, dict):
            yield from _each(value)
        else:
            yield key, value


def _tables(keys: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield keys
    for value in keys.values():
        if isinstance(value, dict):
            yield from _tables(value)


def _stacks(graph: Graph) -> list[list[frozenset[str]]]:
    """The kinds of operators of each layer, for each numbered stack of them."""
    stacks: dict[str, dict[int, set[str]]] = {}
    for operator in graph.operators:
        path = re.match(r"(.*?)\.(\d+)[./]", operator.name)
        if path is not None:
            layers = stacks.setdefault(path[1], {})
            layers.setdefault(int(path[2]), set()).add(operator.kind)
    return [
        [frozenset(layers.get(place, ())) for place in range(max(layers) + 1)]
        for layers in stacks.values()
    ]


def _fewer_layers(keys: Mapping[str, Any], stacks: list[list[frozenset[str]]]) -> dict[str, Any]:
    """The keys of a model with the first layers alone, as many as have every kind of them."""
    counts = {
        value
        for key, value in keys.items()
        if isinstance(value, int) and _LAYERS.search(key) and not _NO_LAYERS.search(key)
    } | {len(stack) for stack in stacks}
    rows = [*stacks, *(value for key, value in keys.items() if _is_row(key, value))]
    cut_to = {n: _first_of_all([row for row in rows if len(row) == n], n) for n in counts if n > 1}
    most = max(counts, default=0)

    def cut(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            if "layer" in key and most in cut_to and all(name.isdigit() for name in value):
                return {name: each for name, each in value.items() if int(name) < cut_to[most]}
            return _fewer_layers(value, stacks)
        if isinstance(value, int) and value in cut_to and _LAYERS.search(key):
            return value if _NO_LAYERS.search(key) else cut_to[value]
        if _is_row(key, value) and len(value) in cut_to:
            return value[: cut_to[len(value)]]
        if _are_places(key, value) and most in cut_to:
            least = [min(value[0], cut_to[most] - 1)]
            return [place for place in value if place < cut_to[most]] or least
        return value

    return {key: cut(key, value) for key, value in keys.items()}


def _is_row(key: str, value: Any) -> bool:
    """Whether a value may have one entry for each layer: a list, or the letters of a pattern."""
    if _are_places(key, value) and len({*value}) == len(value):
        return False
    return isinstance(value, list) or (isinstance(value, str) and "pattern" in key)


def _first_of_all(rows: list[Any], layers: int) -> int:
    """The number of first layers, two at least, that have every kind of `layers` layers."""
    kinds = [[row[place] for row in rows] for place in range(layers)]
    return max(2, *(kinds.index(kind) + 1 for kind in kinds))


def _are_places(key: str, value: Any) -> bool:
    """Whether a value has the places of some layers."""
    whole = isinstance(value, list) and value and all(type(each) is int for each in value)
    return bool(whole and min(value) >= 0 and _PLACES.search(key))


def _fewer(keys: Mapping[str, Any]) -> Change:
    """Cut the experts, the tokens, and what a token sees."""
    marks = {
        mark
        for key, value in _each(keys)
        if _MARK.search(key)
        for mark in (value if isinstance(value, list) else [value])
        if isinstance(mark, int) and mark >= 0
    }
    small = {mark: place for place, mark in enumerate(sorted(marks | {0}))}
    tokens = max(TOKENS, len(small) + 1)

    def cut(key: str, value: Any) -> Any:
        if _MARK.search(key):
            if isinstance(value, list):
                return [small.get(mark, mark) for mark in value]
            return small.get(value, value)
        if not isinstance(value, int) or isinstance(value, bool):
            return value
        if "vocab" in key:
            return min(value, tokens)
        if _EXPERTS.search(key):
            return min(value, EXPERTS)
        if _CHOSEN.search(key) or key in _GROUPS:
            return min(value, 1 if key == "topk_group" else 2)
        return min(value, WINDOW) if _WINDOW.search(key) else value

    return cut


def _factor(keys: Mapping[str, Any], *, stated: bool) -> int:
    """The factor by which all widths are divided.

    `stated`: whether heads stay as many as they are where their size is stated.
    """
    hidden = [value for key, value in _each(keys) if _HIDDEN.search(key) and type(value) is int]
    common = gcd(*hidden)
    for table in _tables(keys):
        heads = _heads(table)
        if stated and _states_heads(table):
            heads = [
                width // count
                for key, width in table.items()
                if _HIDDEN.search(key) and type(width) is int
                for count in heads
                if width % count == 0
            ]
        common = gcd(common, *heads)
    least = min(hidden, default=0)
    fitting = (f for f in range(common, 0, -1) if common % f == 0 and least // f >= LEAST_WIDTH)
    return next(fitting, 1)


def _stated(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with the size of a head where a table leaves it to be worked out."""
    heads = keys.get("num_attention_heads")
    hidden = keys.get("hidden_size")
    whole = {key: _stated(each) if isinstance(each, dict) else each for key, each in keys.items()}
    if isinstance(heads, int) and isinstance(hidden, int) and whole.get("head_dim", 0) is None:
        whole["head_dim"] = hidden // heads
    return whole


def _heads(table: Mapping[str, Any]) -> list[int]:
    return [v for key, v in table.items() if _HEADS.search(key) and type(v) is int and v > 0]


def _states_heads(table: Mapping[str, Any]) -> bool:
    """Whether a table has the size of a head."""
    return any(_HEAD_SIZE.search(key) and type(value) is int for key, value in table.items())


def _narrower(keys: Mapping[str, Any], factor: int, *, stated: bool) -> dict[str, Any]:
    keep = stated and _states_heads(keys)

    def divided(key: str, value: Any) -> Any:
        if isinstance(value, dict):
            return _narrower(value, factor, stated=stated)
        if isinstance(value, list) and _WIDTH.search(key):
            return [divided(key, each) for each in value]
        if type(value) is not int or value < factor:
            return value
        if _HEADS.search(key):
            return value if keep else value // factor
        if _WIDTH.search(key) and not _NO_WIDTH.search(key):
            # Kernels take rows of whole 16 bytes.
            return value // factor if value % factor == 0 else 8 * -(-value // (8 * factor))
        return value

    return {key: divided(key, value) for key, value in keys.items()}
