"""A mask that no input reaches is a constant; one that is causal is said by `is_causal`.

`torch.export` has transformers build a mask [batch, 1, queries, keys] of counted places, which a
run without it leaves to the attention's kernel. The kernel then skips what is hidden, and no tensor
of queries times keys is made.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import TypeAlias

import torch

from autopar.ir import Graph, Operator, Ref, needed_operators

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


def without_known_masks(graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
    """The graph with every mask left out that is known to hide nothing, or what comes later.

    Other masks stay as they are. `constants`: what the exported program holds.
    """
    if not any(_mask_of(operator) for operator in graph.operators):
        return graph
    numbers = {
        name: value
        for name, value in constants.items()
        # Other constants are the module's own, which may change between runs.
        if name.startswith(_LIFTED) and type(value) is torch.Tensor and value.numel() == 1
    }
    patterns: dict[tuple[str, int, int], _Pattern | None] = {}
    operators = []
    with torch.no_grad(), torch.device("cpu"):
        known = KnownValues(graph, {n: v.cpu() for n, v in numbers.items() if not v.is_meta})
        for operator in graph.operators:
            name = _mask_of(operator)
            if name is not None:
                queries, keys = (graph.tensors[x].shape[-2] for x in operator.inputs[:2])
                place = (name, queries, keys)
                if place not in patterns:
                    patterns[place] = _pattern(known.value(name), queries, keys)
                operator = _unmasked(operator, patterns[place])
            operators.append(operator)
    needed = {*graph.outputs, *graph.updates.values(), *((graph.loss,) if graph.loss else ())}
    return replace(graph, operators=needed_operators(operators, needed))


def _mask_of(operator: Operator) -> str | None:
    """The mask of an attention, where it is its last tensor."""
    if operator.kind != _ATTENTION or operator.attributes.get("is_causal"):
        return None
    last = len(operator.inputs) - 1
    given = operator.attributes.get("attn_mask") == Ref(last) and last == 3
    return operator.inputs[last] if given else None


def _unmasked(operator: Operator, pattern: _Pattern | None) -> Operator:
    if pattern is None:
        return operator
    attributes = {**operator.attributes, "attn_mask": None}
    if pattern is _Pattern.CAUSAL:
        attributes["is_causal"] = True
    return replace(operator, inputs=operator.inputs[:3], attributes=attributes)


def _pattern(value: Known | None, queries: int, keys: int) -> _Pattern | None:
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
    places = torch.arange(queries).unsqueeze(1)
    if queries == keys and bool((low == 0).all()) and bool((high == places + 1).all()):
        return _Pattern.CAUSAL
    return None


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
