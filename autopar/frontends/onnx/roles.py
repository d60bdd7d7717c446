"""Tells stored floats that no training changes from weights: ONNX files hold both as initializers.

A stored float tensor of several elements is a trained parameter, unless

- it is a running statistic of a batch normalisation in inference form;
- it is a vector of frequencies, or of positions: on every way to an output it meets nothing but
  integers, numbers and
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
from autopar.ir.graph import Role

from .builder import Record
from .values import FOLD_LIMIT, Val, is_float_code
from .weights import holds_data, read_tensor

_WAVES = frozenset({"onnx.Sin", "onnx.Cos"})
_PRODUCTS = frozenset({"onnx.Mul", "onnx.MatMul"})
_LOOK_UPS = frozenset({"onnx.Gather", "onnx.GatherND", "onnx.GatherElements"})
_MASKING = frozenset(
    f"onnx.{kind}"
    for kind in ("Add", "Sub", "Where", "Min", "Max", "Slice", "Expand", "Unsqueeze", "Cast")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Roles:
    """The user's choice of parameters among the stored floats.

    `frozen` and `trained` are patterns of names; `exactly` names all parameters.
    """

    frozen: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    exactly: Collection[str] | None = None


def settle_roles(records: Sequence[Record], outputs: Sequence[Val], roles: Roles) -> None:
    """Give the stored floats that operators read their roles.

    The running statistics have theirs.
    """
    stored = {val.name: val for record in records for val in record.tensors() if _is_stored(val)}
    if roles.exactly is not None:
        for name, val in stored.items():
            val.role = Role.PARAMETER if name in roles.exactly else Role.CONSTANT
        return
    fixed = _frequencies(records, outputs) | _masks(records)
    for val in stored.values():
        if val in fixed:
            val.role = Role.CONSTANT
    for patterns, option, role in (
        (roles.frozen, "frozen", Role.CONSTANT),
        (roles.trained, "trained", Role.PARAMETER),
    ):
        for name in _matching(patterns, stored, option):
            stored[name].role = role


def _is_stored(val: Val) -> bool:
    """A float tensor of several elements from the file, whatever its role is by now."""
    return (
        is_float_code(val.dtype)
        and val.size > 1
        and (val.role is Role.PARAMETER or (val.role is Role.CONSTANT and not val.foldable))
    )


def _matching(patterns: Iterable[str], names: Collection[str], option: str) -> list[str]:
    matches = []
    for pattern in patterns:
        hits = [name for name in sorted(names) if name == pattern] or [
            name for name in sorted(names) if fnmatchcase(name, pattern)
        ]
        if not hits:
            raise UsageError(
                f"--{option} {pattern!r}: the model stores no float tensor of that name; there are "
                f"{_some(names)}"
            )
        matches += hits
    return matches


def _some(names: Collection[str]) -> str:
    if not names:
        return "none"
    first = sorted(names)[:10]
    return ", ".join(first) + (", ..." if len(names) > len(first) else "")


def _frequencies(records: Sequence[Record], outputs: Sequence[Val]) -> set[Val]:
    """Find stored vectors that are frequencies or positions.

    Before a sine or cosine they meet nothing but integers, numbers and one another.
    """
    # Value → the stored vectors that it depends on, where these met nothing else.
    alone: dict[Val, frozenset[Val]] = {}
    # Values that depend on floats from outside or on weights.
    data: set[Val] = set()
    waved: set[Val] = set()
    weights: set[Val] = set()

    def depends_on(val: Val) -> frozenset[Val]:
        if val.role is Role.PARAMETER:
            return frozenset({val})
        return alone.get(val, frozenset())

    def is_data(val: Val) -> bool:
        outside = val.role is Role.INPUT and is_float_code(val.dtype)
        return outside or val in data or (val.role is Role.PARAMETER and not _is_vector(val))

    for record in records:
        inputs = list(record.tensors())
        parts = {depends_on(val) for val in inputs} - {frozenset()}
        sources = frozenset().union(*parts)
        joined = len(parts) > 1 and record.kind not in _PRODUCTS
        if any(map(is_data, inputs)) or (sources and (joined or record.kind in _LOOK_UPS)):
            weights |= sources
            data.update(record.outputs)
        elif sources and record.kind in _WAVES:
            waved |= sources
        elif sources:
            alone |= dict.fromkeys(record.outputs, sources)
    for val in outputs:
        weights |= depends_on(val)
    return waved - weights


def _is_vector(val: Val) -> bool:
    return sum(size > 1 for size in val.shape) == 1


def _masks(records: Sequence[Record]) -> set[Val]:
    """Stored tensors that masks are made of and that hold values no weight holds."""
    readers: dict[Val, set[str]] = {}
    for record in records:
        for val in record.tensors():
            if val.role is Role.PARAMETER and val.size <= FOLD_LIMIT:
                readers.setdefault(val, set()).add(record.kind)
    return {val for val, kinds in readers.items() if kinds <= _MASKING and _is_mask(val)}


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
