"""Tells stored floats that no training changes from weights: ONNX files hold both as initializers.

A stored float tensor of several elements is a trained parameter, unless

- it is a running statistic of a batch normalisation in inference form;
- it is a vector of frequencies, or of positions: on every way to an output it meets nothing but integers, numbers and
  a product with another such vector before a sine or cosine;
- it is a mask: some element is infinite, NaN, or the lowest number of its type.

`Roles` overrules this by name or pattern.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np

from autopar.errors import ModelError, UsageError
from autopar.frontends.onnx_build import Record
from autopar.frontends.onnx_values import FOLD_LIMIT, Val, is_float_code
from autopar.frontends.onnx_weights import holds_data, read_tensor
from autopar.ir.graph import Role

_WAVES = frozenset({"onnx.Sin", "onnx.Cos"})
_PRODUCTS = frozenset({"onnx.Mul", "onnx.MatMul"})
_LOOK_UPS = frozenset({"onnx.Gather", "onnx.GatherND", "onnx.GatherElements"})
_MASKING = frozenset(f"onnx.{kind}" for kind in ("Add", "Sub", "Where", "Min", "Max", "Slice", "Expand", "Unsqueeze", "Cast"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The user's choice: patterns of stored floats that are constants or parameters, or `exactly` the parameters."""

    frozen: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    exactly: Collection[str] | None = None


def settle_roles(records: Sequence[Record], outputs: Sequence[Val], roles: Roles) -> None:
    """Give the stored floats that operators read their roles; the running statistics have theirs."""
    stored = {val.name: val for record in records for val in record.tensors() if _is_stored(val)}
    if roles.exactly is not None:
        for name, val in stored.items():
            val.role = Role.PARAMETER if name in roles.exactly else Role.CONSTANT
        return
    fixed = _frequencies(records, outputs) | _masks(records)
    for val in stored.values():
        if id(val) in fixed:
            val.role = Role.CONSTANT
    for patterns, option, role in ((roles.frozen, "frozen", Role.CONSTANT), (roles.trained, "trained", Role.PARAMETER)):
        for name in _matching(patterns, stored, option):
            stored[name].role = role


def _is_stored(val: Val) -> bool:
    """A float tensor of several elements from the file, whatever its role is by now."""
    return is_float_code(val.dtype) and val.size > 1 and (val.role is Role.PARAMETER or (val.role is Role.CONSTANT and not val.foldable))


def _matching(patterns: Iterable[str], names: Collection[str], option: str) -> list[str]:
    found = []
    for pattern in patterns:
        hits = [name for name in sorted(names) if name == pattern] or [name for name in sorted(names) if fnmatchcase(name, pattern)]
        if not hits:
            raise UsageError(f"--{option} {pattern!r}: the model stores no float tensor of that name; there are {_some(names)}")
        found += hits
    return found


def _some(names: Collection[str]) -> str:
    first = sorted(names)[:10]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "") if first else "none"


def _frequencies(records: Sequence[Record], outputs: Sequence[Val]) -> set[int]:
    """Stored vectors that meet nothing but integers, numbers and one another before a sine or cosine."""
    alone: dict[int, frozenset[int]] = {}  # value → the stored vectors that it depends on, where these met nothing else
    data: set[int] = set()  # values that depend on floats from outside or on weights
    waved: set[int] = set()
    weights: set[int] = set()

    def depends_on(val: Val) -> frozenset[int]:
        return frozenset({id(val)}) if val.role is Role.PARAMETER else alone.get(id(val), frozenset())

    def is_data(val: Val) -> bool:
        outside = val.role is Role.INPUT and is_float_code(val.dtype)
        return outside or id(val) in data or (val.role is Role.PARAMETER and not _is_vector(val))

    for record in records:
        inputs = list(record.tensors())
        parts = {depends_on(val) for val in inputs} - {frozenset()}
        sources = frozenset().union(*parts)
        joined = len(parts) > 1 and record.kind not in _PRODUCTS
        if any(map(is_data, inputs)) or (sources and (joined or record.kind in _LOOK_UPS)):
            weights |= sources
            data.update(id(val) for val in record.outputs)
        elif sources and record.kind in _WAVES:
            waved |= sources
        elif sources:
            alone.update((id(val), sources) for val in record.outputs)
    for val in outputs:
        weights |= depends_on(val)
    return waved - weights


def _is_vector(val: Val) -> bool:
    return sum(size > 1 for size in val.shape) == 1


def _masks(records: Sequence[Record]) -> set[int]:
    """Stored tensors that masks are made of and that hold values no weight holds."""
    readers: dict[int, set[str]] = {}
    known: dict[int, Val] = {}
    for record in records:
        for val in record.tensors():
            if val.role is Role.PARAMETER and val.size <= FOLD_LIMIT:
                known[id(val)] = val
                readers.setdefault(id(val), set()).add(record.kind)
    return {key for key, val in known.items() if readers[key] <= _MASKING and _is_mask(val)}


def _is_mask(val: Val) -> bool:
    array = val.array
    if array is None and val.payload is not None and holds_data(val.payload):
        try:
            array = read_tensor(val.payload, None)
        except ModelError:  # reported where weights are read
            return False
    if array is None or array.dtype.kind != "f":
        return False
    return not np.isfinite(array).all() or bool(array.min() <= np.finfo(array.dtype).min)
