"""A mask that no input reaches is a constant; one that is causal is said by `is_causal`.

`torch.export` has transformers build a mask [batch, 1, queries, keys] of counted places, which a
run without it leaves to the attention's kernel. The kernel then skips what is hidden, and no tensor
of queries times keys is made.

Torch's kernels know no windows (`i - before <= j <= i + after` for query i and key j). Such a mask
stays one, [queries, keys], made of two comparisons for all sequences and layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import NamedTuple, TypeAlias

import torch

from autopar.ir import Graph, Operator, Ref, Tensor, Value, needed_operators

from .bands import Band
from .known_values import Known, KnownValues

_ATTENTION = "aten.scaled_dot_product_attention.default"
_LIFTED = "lifted_tensor"
"""What `torch.export` calls a number that the model's code writes as a tensor."""


_Range: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The first key that each query sees, and the one behind the last: [..., queries or 1, 1]."""


class _Pattern(Enum):
    WHOLE = "every query sees every key"
    CAUSAL = "a query sees the keys up to its own place"


class _Blocks(NamedTuple):
    """So many blocks of equal size along the diagonal: a query sees the keys of its own."""

    blocks: int


class _Window(NamedTuple):
    """A query among `size` sees so many keys before its own place, and so many behind it."""

    size: int
    before: int
    after: int


_Known: TypeAlias = "_Pattern | _Window | _Blocks"


def without_known_masks(graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
    """The graph with every mask left out that is known to hide nothing, or what comes later.

    A known window has a mask without a batch, and known blocks are samples of their own. Others
    stay as they are. `constants`: what the exported program holds.
    """
    if not any(map(_mask_of, graph.operators)):
        return graph
    with torch.no_grad(), torch.device("cpu"):
        patterns = _patterns(graph, constants)
    tensors = dict(graph.tensors)
    masks: dict[_Window, str] = {}
    first: list[Operator] = []
    operators = []
    for operator in graph.operators:
        pattern = patterns.get(operator.name)
        if isinstance(pattern, _Window):
            if pattern not in masks:
                made = _window_mask(pattern, tensors)
                masks[pattern] = made[-1].outputs[0]
                first += made
            operator = replace(operator, inputs=(*operator.inputs[:3], masks[pattern]))
        elif isinstance(pattern, _Blocks):
            operators += _in_blocks(_unmasked(operator, _Pattern.WHOLE), pattern.blocks, tensors)
            continue
        elif pattern is not None:
            operator = _unmasked(operator, pattern)
        operators.append(operator)
    wanted = {*graph.outputs, *graph.updates.values(), *((graph.loss,) if graph.loss else ())}
    needed = needed_operators([*first, *operators], wanted)
    return replace(graph, tensors=tensors, operators=needed)


def _patterns(graph: Graph, constants: Mapping[str, torch.Tensor]) -> dict[str, _Known | None]:
    """The patterns of the attentions' masks, by operator."""
    numbers = {
        name: value.cpu()
        for name, value in constants.items()
        # Other constants are the module's own, which may change between runs.
        if name.rpartition(".")[2].startswith(_LIFTED)
        and type(value) is torch.Tensor
        and not value.is_meta
    }
    known = KnownValues(graph, numbers)
    patterns: dict[str, _Known | None] = {}
    by_mask: dict[tuple[object, int, int], _Known | None] = {}
    for operator in graph.operators:
        name = _mask_of(operator)
        if name is None:
            continue
        queries, keys = (graph.tensors[one].shape[-2] for one in operator.inputs[:2])
        # Layers of one kind hold one constant, under names of their own.
        case = (id(constants[name]) if name in constants else name, queries, keys)
        if case not in by_mask:
            by_mask[case] = _pattern(known.value(name), queries, keys)
        patterns[operator.name] = by_mask[case]
    return patterns


def _mask_of(operator: Operator) -> str | None:
    """The mask of an attention, where it is its last tensor."""
    if operator.kind != _ATTENTION or operator.attributes.get("is_causal"):
        return None
    last = len(operator.inputs) - 1
    given = operator.attributes.get("attn_mask") == Ref(last) and last == 3
    return operator.inputs[last] if given else None


def _unmasked(operator: Operator, pattern: _Pattern) -> Operator:
    attributes = {**operator.attributes, "attn_mask": None}
    if pattern is _Pattern.CAUSAL:
        attributes["is_causal"] = True
    return replace(operator, inputs=operator.inputs[:3], attributes=attributes)


def _window_mask(window: _Window, tensors: dict[str, Tensor]) -> list[Operator]:
    """The operators that make the mask of a window; the last one gives it."""
    size, before, after = window
    operators: list[Operator] = []

    def add(kind: str, shape: tuple[int, ...], *inputs: str, **attributes: Value) -> str:
        name = f"window.{size}.{before}.{after}/{kind.split('.')[1]}"
        dtype = "bool" if shape == (size, size) else "int64"
        result = Tensor(name=f"{name}:0", shape=shape, dtype=dtype)
        tensors[result.name] = result
        operators.append(
            Operator(
                name=name, kind=kind, inputs=inputs, outputs=(result.name,), attributes=attributes
            )
        )
        return result.name

    both: Mapping[str, Value] = {"self": Ref(0), "other": Ref(1)}
    keys = add("aten.arange.default", (size,), end=size)
    queries = add("aten.unsqueeze.default", (size, 1), keys, self=Ref(0), dim=1)
    first = add("aten.sub.Tensor", (size, 1), queries, self=Ref(0), other=before)
    last = add("aten.add.Tensor", (size, 1), queries, self=Ref(0), other=after)
    not_before = add("aten.ge.Tensor", (size, size), keys, first, **both)
    not_behind = add("aten.le.Tensor", (size, size), keys, last, **both)
    add("aten.logical_and.default", (size, size), not_before, not_behind, **both)
    return operators


def _pattern(value: Known | None, queries: int, keys: int) -> _Known | None:
    """The pattern of what queries see behind a mask, if it is one of them."""
    if isinstance(value, Band):
        seen = _seen_of_band(value)
    else:
        seen = None if value is None else _seen(value, keys)
    if seen is None:
        return None
    low, high = seen
    if bool((low == 0).all()) and bool((high == keys).all()):
        return _Pattern.WHOLE
    # Torch's kernels do not agree on where the diagonal lies in a mask that is not square.
    if queries != keys:
        return None
    places = torch.arange(queries).unsqueeze(1)
    if bool((low == 0).all()) and bool((high == places + 1).all()):
        return _Pattern.CAUSAL
    if count := _blocks(low, high, places):
        return _Blocks(count)
    window = _Window(queries, queries - 1 - int(low.flatten()[-1]), int(high.flatten()[0]) - 1)
    fits = (low == (places - window.before).clamp(min=0)) & (
        high == (places + window.after + 1).clamp(max=keys)
    )
    return window if bool(fits.all()) and min(window.before, window.after) >= 0 else None


def _blocks(low: torch.Tensor, high: torch.Tensor, places: torch.Tensor) -> int:
    """The blocks of equal size along the diagonal that make up what is seen; 0 if none do."""
    queries = places.numel()
    size = int(high.flatten()[0])
    if size == 0 or queries % size:
        return 0
    first = places - places % size
    return queries // size if bool(((low == first) & (high == first + size)).all()) else 0


def _seen_of_band(band: Band) -> _Range | None:
    """The keys that each query sees; None if they are not in one piece from the first one on."""
    inside = _shown(band.inside)
    outside = _shown(band.outside)
    if inside is None or outside is None:
        return None
    none = torch.zeros_like(band.low)
    all_of = torch.full_like(band.low, band.keys)
    if bool(inside) == bool(outside):
        return none, (all_of if inside else none)
    if inside:
        return band.low, band.high
    hides_last = (band.high == band.keys) | (band.low == band.high)
    shown = torch.where(band.low < band.high, band.low, all_of)
    return (none, shown) if bool(hides_last.all()) else None


def _seen(mask: torch.Tensor, keys: int) -> _Range | None:
    """The keys that each query sees; None if they are not in one piece."""
    shown = _shown(mask)
    if shown is None:
        return None
    shown = shown.expand(*mask.shape[:-1], keys)
    low = shown.to(torch.uint8).argmax(-1, keepdim=True)
    high = low + shown.sum(-1, keepdim=True)
    places = torch.arange(keys)
    return (low, high) if torch.equal((low <= places) & (places < high), shown) else None


def _shown(mask: torch.Tensor) -> torch.Tensor | None:
    """The elements that show a key; None if one neither shows nor hides it.

    The least number of a type hides as -inf does: it is added to scores, and no score lies within
    rounding of its opposite. In float16 one may.
    """
    if mask.dtype == torch.bool:
        return mask
    shown = mask == 0
    hides = -math.inf if mask.dtype == torch.float16 else torch.finfo(mask.dtype).min
    return shown if bool((shown | (mask <= hides)).all()) else None


def _in_blocks(attention: Operator, count: int, tensors: dict[str, Tensor]) -> list[Operator]:
    """The operators of an attention without a mask, for `count` blocks of each sample.

    Sums over the keys of [b, heads, n s, d] with n blocks of s are those of [b n, heads, s, d]. New
    tensors go into `tensors`.
    """
    operators: list[Operator] = []
    result = tensors[attention.outputs[0]]

    def add(kind: str, source: str, sizes: tuple[int, ...], **attributes: Value) -> str:
        name = f"{attention.name}.blocks.{len(operators)}"
        made = replace(tensors[source], name=f"{name}:0", shape=sizes, role=result.role)
        tensors[made.name] = replace(made, trainable=False)
        operators.append(
            Operator(
                name=name,
                kind=kind,
                inputs=(source,),
                outputs=(made.name,),
                attributes={"self": Ref(0), **attributes},
            )
        )
        return made.name

    def view(source: str, *shape: int) -> str:
        return add("aten.reshape.default", source, shape, shape=shape)

    def swap(source: str) -> str:
        """Exchange the two dims behind the first."""
        samples, one, other, *rest = tensors[source].shape
        shape = (samples, other, one, *rest)
        return add("aten.transpose.int", source, shape, dim0=1, dim1=2)

    def apart(source: str) -> str:
        samples, heads, places, width = tensors[source].shape
        cut = swap(view(source, samples, heads, count, places // count, width))
        return view(cut, samples * count, heads, places // count, width)

    inputs = tuple(apart(name) for name in attention.inputs)
    samples, heads, places, width = result.shape
    name = f"{attention.name}.blocks"
    small = replace(
        result, name=f"{name}:0", shape=(samples * count, heads, places // count, width)
    )
    tensors[small.name] = small
    operators.append(replace(attention, name=name, inputs=inputs, outputs=(small.name,)))
    cut = view(small.name, samples, count, heads, places // count, width)
    last = view(swap(cut), *result.shape)
    joined = replace(operators[-1], name=attention.name, outputs=attention.outputs)
    del tensors[last]
    return [*operators[:-1], joined]
