"""Figures of gradients that other stages hold: which operators they answer, which scale them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

ATEN = torch.ops.aten
NORM = 0
LARGEST = 1


class Figures:
    """The Euclidean norm and the largest element of a gradient, which its views share.

    `values`: both, on the device; None if they are unknown. `told`: the end of a backward pass
    tells them.
    """

    __slots__ = ("told", "values")

    def __init__(self, values: Tensor | None = None, *, told: bool = False) -> None:
        self.values = values
        self.told = told

    def scaled(self, factor: Any) -> Figures:
        """The figures of a multiple."""
        if self.values is None or factor is None:
            return Figures(None, told=self.told)
        return Figures(self.values * abs(factor), told=self.told)


Pick = Callable[[Tensor], Tensor]


def _norm_of(order: Any) -> Pick | None:
    """The figure that is a norm; "fro" and None are torch's words for the Euclidean one."""
    if order in (None, "fro", 2):
        return lambda values: values[NORM]
    return (lambda values: values[LARGEST]) if order == math.inf else None


def _largest(values: Tensor) -> Tensor:
    return values[LARGEST]


_PICKS: Mapping[tuple[str, Any], Pick] = {
    ("sizes", ATEN.max): _largest,
    ("sizes", ATEN.amax): _largest,
    ("squares", ATEN.sum): lambda values: values[NORM] ** 2,
    ("squares", ATEN.max): lambda values: values[LARGEST] ** 2,
    ("squares", ATEN.amax): lambda values: values[LARGEST] ** 2,
    # The largest element is not a number if any element is not.
    ("finite", ATEN.all): lambda values: values[LARGEST].isfinite(),
    ("nan", ATEN.any): lambda values: values[LARGEST].isnan(),
}
"""Figures that are results of operators over all elements, by the kind of these elements."""


def figure_of(kind: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Pick | None:
    """The figure that is an operator's result over all elements; None if there is none."""
    packet = func.overloadpacket
    dims = kwargs.get("dim")
    # Torch's many spellings of a norm all come down to these.
    if packet in (ATEN.linalg_vector_norm, ATEN.norm):
        if kind not in ("values", "sizes"):
            return None
        order = args[1] if len(args) > 1 else kwargs.get("ord", kwargs.get("p", 2))
        dims = args[2] if len(args) > 2 and not isinstance(args[2], torch.dtype) else dims
        pick = _norm_of(order)
    else:
        dims = args[1] if len(args) > 1 else dims
        pick = _PICKS.get((kind, packet))
    # An operator without figures may have anything in the place of dims.
    if pick is None or dims is None or dims == [] or dims == list(range(args[0].dim())):
        return pick
    return None


def kind_of(kind: str, func: Any, args: Sequence[Any]) -> str:
    """The kind of the elements that an operator makes of others; "" if figures tell nothing."""
    packet = func.overloadpacket
    if kind == "values" and packet is ATEN.abs:
        return "sizes"
    if kind in ("values", "sizes"):
        # Squares are powers here, or products of a tensor with itself.
        squared = packet is ATEN.pow and args[1] == 2
        if squared or (packet is ATEN.mul and args[0] is args[1]):
            return "squares"
        if packet is ATEN.isnan:
            return "nan"
    return ""


def factor_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The number by which an operator multiplies all elements; None if it does something else."""
    packet = func.overloadpacket
    if packet in (ATEN.neg, ATEN.neg_):
        return 1.0
    times = packet in (ATEN.mul, ATEN.mul_)
    if kwargs or not (times or packet in (ATEN.div, ATEN.div_)):
        return None
    # A number may be the first: torch.tensor(0.5) * x.
    other = args[0] if times and _is_number(args[0]) else args[1]
    if isinstance(other, Tensor):
        if not _is_number(other):
            return None
        return other if times else other.reciprocal()
    # Zeros times infinity are no numbers, which a norm does not tell.
    if not math.isfinite(other) or (not times and other == 0):
        return None
    return other if times else 1.0 / other


def _is_number(value: Any) -> bool:
    """Whether a value is a tensor of one number, which all ranks have."""
    return type(value) is Tensor and not value.dim()
