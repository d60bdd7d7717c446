"""Patterns of masks: the keys that queries see where that is known, and a window's operators.

A mask is known where no input, parameter or buffer reaches it (`known_values.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple, TypeAlias

import numpy as np
import torch

from autopar.ir import Graph, Operator, Ref, Tensor, Value

from .bands import Band
from .known_values import Known, KnownValues

_LIFTED = "lifted_tensor"
"""What `torch.export` calls a number that the model's code writes as a tensor."""


_Range: TypeAlias = tuple[torch.Tensor, torch.Tensor]
"""The first key that each query sees, and the one behind the last: [..., queries or 1, 1]."""


class Plain(Enum):
    WHOLE = "every query sees every key"
    CAUSAL = "a query sees the keys up to its own place"


class Blocks(NamedTuple):
    """So many blocks of equal size along the diagonal: a query sees the keys of its own."""

    blocks: int


class Window(NamedTuple):
    """A query among `size` sees so many keys before its own place, and so many behind it."""

    size: int
    before: int
    after: int


Pattern: TypeAlias = "Plain | Window | Blocks"


def known_values_of(graph: Graph, constants: Mapping[str, torch.Tensor]) -> KnownValues:
    """The values that a graph makes from nothing; `constants`: what its exported program holds."""
    numbers = {
        name: value.cpu()
        for name, value in constants.items()
        # Other constants are the module's own, which may change between runs.
        if name.rpartition(".")[2].startswith(_LIFTED)
        and type(value) is torch.Tensor
        and not value.is_meta
    }
    return KnownValues(graph, numbers)


def window_mask(window: Window, tensors: dict[str, Tensor]) -> list[Operator]:
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


def pattern_of(value: Known | None, queries: int, keys: int) -> Pattern | None:
    """The pattern of what queries see behind a mask, if it is one of them."""
    if isinstance(value, Band):
        seen = _seen_of_band(value)
    else:
        seen = None if value is None else _seen(value, keys)
    if seen is None:
        return None
    low, high = seen
    if bool((low == 0).all()) and bool((high == keys).all()):
        return Plain.WHOLE
    # Torch's kernels do not agree on where the diagonal lies in a mask that is not square.
    if queries != keys:
        return None
    places = torch.arange(queries).unsqueeze(1)
    if bool((low == 0).all()) and bool((high == places + 1).all()):
        return Plain.CAUSAL
    if count := _blocks(low, high, places):
        return Blocks(count)
    window = Window(queries, queries - 1 - int(low.flatten()[-1]), int(high.flatten()[0]) - 1)
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
    # NumPy looks at truth values in a tenth of torch's time, and a mask may have 2^24.
    rows = shown.expand(*mask.shape[:-1], keys).numpy()
    low = rows.argmax(axis=-1, keepdims=True)
    behind = keys - rows[..., ::-1].argmax(axis=-1, keepdims=True)
    spans = np.where(np.take_along_axis(rows, low, axis=-1), behind - low, 0)
    # No span is shorter than the number of its keys, so all of them are only if their sum is.
    if spans.sum() != np.count_nonzero(rows):
        return None
    return torch.from_numpy(low), torch.from_numpy(low + spans)


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
