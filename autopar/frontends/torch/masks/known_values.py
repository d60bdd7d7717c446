"""Values of a graph that no input, parameter or buffer reaches, without laying them out whole.

A value keeps its number of dims, but a dim along which it is known not to change has size 1. So a
mask that is equal for all sequences of a batch is that of one. A comparison of places, one value a
query with one value a key, is a `Band`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from autopar.ir import Graph, Operator, Ref, Value
from autopar.ir import Tensor as Result

from .bands import COMPARED, MOST, Band, compared, joined, triangle

Known: TypeAlias = "Tensor | Band"


def _kinds(text: str) -> frozenset[str]:
    return frozenset(f"aten.{name}" for name in text.split())


_FILLED: Mapping[str, Value] = {
    "aten.zeros.default": 0,
    "aten.zeros_like.default": 0,
    "aten.new_zeros.default": 0,
    "aten.ones.default": 1,
    "aten.ones_like.default": 1,
    "aten.new_ones.default": 1,
    "aten.full.default": None,
    "aten.full_like.default": None,
    "aten.new_full.default": None,
}
"""Operators that read no element of their inputs → their elements, if these are no argument."""
_ELEMENTWISE = _kinds(
    """
    eq.Tensor eq.Scalar ne.Tensor ne.Scalar lt.Tensor lt.Scalar le.Tensor le.Scalar gt.Tensor
    gt.Scalar ge.Tensor ge.Scalar add.Tensor add.Scalar sub.Tensor sub.Scalar rsub.Scalar mul.Tensor
    mul.Scalar div.Tensor div.Scalar div.Tensor_mode div.Scalar_mode floor_divide.default
    remainder.Scalar remainder.Tensor neg.default abs.default minimum.default maximum.default
    clamp.default __and__.Tensor __or__.Tensor __xor__.Tensor bitwise_and.Tensor bitwise_or.Tensor
    bitwise_xor.Tensor bitwise_not.default logical_and.default logical_or.default
    logical_xor.default logical_not.default where.self where.ScalarOther where.ScalarSelf
    where.Scalar masked_fill.Scalar masked_fill.Tensor to.dtype to.dtype_layout to.device
    _to_copy.default clone.default contiguous.default alias.default detach.default
    lift_fresh_copy.default
    """
)
_ALONG = _kinds("cumsum.default diff.default slice.Tensor")
"""Operators that work along one dim, for each place in the others by itself."""
_OTHERS = _kinds(
    """
    arange.default arange.start arange.start_step unsqueeze.default expand.default view.default
    reshape.default index.Tensor tril.default triu.default transpose.int permute.default
    t.default squeeze.dim squeeze.default select.int cat.default flip.default
    """
)
_READ = _ELEMENTWISE | _ALONG | _OTHERS
_VIEWS = _kinds("unsqueeze.default view.default transpose.int t.default permute.default select.int")
_RESHAPED = _kinds("unsqueeze.default view.default reshape.default slice.Tensor")
_TRIANGLES = _kinds("tril.default triu.default")
_AND = _kinds("__and__.Tensor bitwise_and.Tensor logical_and.default")


class KnownValues:
    """The values of a graph that its operators make from nothing, worked out when asked for.

    `numbers`: constants of one element, on the CPU.
    """

    def __init__(self, graph: Graph, numbers: Mapping[str, Tensor]) -> None:
        self._tensors = graph.tensors
        self._values: dict[str, Known | None] = dict(numbers)
        self._makers: dict[str, Operator] = {}
        known = set(numbers)
        for operator in graph.operators:
            filled = operator.kind in _FILLED
            names = (*operator.outputs, *(() if filled else operator.inputs))
            if any(graph.tensors[name].size == 0 for name in names):
                continue
            if filled or (operator.kind in _READ and known.issuperset(operator.inputs)):
                known.update(operator.outputs)
                # A filled tensor reads a type and a shape of its input, and has both itself.
                own = replace(operator, inputs=()) if filled else operator
                self._makers[operator.outputs[0]] = own

    def holds(self, name: str) -> bool:
        """Whether a tensor is made of nothing but numbers, whether or not its value is known."""
        return name in self._makers or name in self._values

    def value(self, name: str) -> Known | None:
        """A tensor's value; None if it is not known."""
        stack = [name]
        while stack:
            maker = self._makers.get(stack[-1])
            missing = [one for one in maker.inputs if one not in self._values] if maker else []
            if not missing:
                last = stack.pop()
                if last not in self._values:
                    self._values[last] = self._made(maker) if maker else None
            stack += missing
        return self._values[name]

    def _made(self, operator: Operator) -> Known | None:
        """The result of an operator whose inputs are worked out."""
        rank = len(self._tensors[operator.outputs[0]].shape)
        given = [one for name in operator.inputs if (one := self._values[name]) is not None]
        if len(given) < len(operator.inputs):
            return None
        if self._only_deepens(operator):
            return _deepened(given[0], rank)
        banded = self._banded(operator, given)
        if banded is not None:
            return _deepened(banded, rank)
        laid_out = [one.whole() if isinstance(one, Band) else one for one in given]
        tensors = [one for one in laid_out if one is not None]
        return self._computed(operator, tensors) if len(tensors) == len(given) else None

    def _banded(self, operator: Operator, given: list[Known]) -> Band | None:
        """The result as a band, where it is one and its rule is known."""
        result = self._tensors[operator.outputs[0]]
        band = None
        if operator.kind in _ELEMENTWISE:
            band = _band(operator, given)
        elif operator.kind in _TRIANGLES and isinstance(given[0], Tensor):
            diagonal = operator.attributes.get("diagonal", 0)
            assert isinstance(diagonal, int)
            upper = operator.kind == "aten.triu.default"
            band = triangle(given[0], result.shape, diagonal, upper=upper)
        if band is None or str(band.inside.dtype) == f"torch.{result.dtype}":
            return band
        return None

    def _only_deepens(self, operator: Operator) -> bool:
        """Whether an operator repeats its input along dims, or puts dims of size 1 in front."""
        if operator.kind not in _RESHAPED:
            return operator.kind == "aten.expand.default"
        before = self._tensors[operator.inputs[0]].shape
        after = self._tensors[operator.outputs[0]].shape
        return (1,) * (len(after) - len(before)) + before == after

    def _computed(self, operator: Operator, tensors: list[Tensor]) -> Tensor | None:
        """The operator's own result, of as few elements as are needed for it."""
        result = self._tensors[operator.outputs[0]]
        if operator.kind in _FILLED:
            return _filled(operator, (1,) * len(result.shape), getattr(torch, result.dtype))
        shapes = [self._tensors[name].shape for name in operator.inputs]
        if operator.kind in _ALONG:
            tensors = _whole_along(operator, tensors, shapes)
        elif operator.kind in _OTHERS:
            tensors = [one.expand(shape) for one, shape in zip(tensors, shapes, strict=True)]
        if operator.kind == "aten.reshape.default" and result.size > MOST:
            # A dim of 1 between others needs no copy. Where it does, the view fails.
            view: dict[str, Value] = {"self": Ref(0), "size": result.shape}
            operator = replace(operator, kind="aten.view.default", attributes=view)
        if operator.kind in _VIEWS:
            size = 0
        elif operator.kind in _OTHERS:
            size = max(result.size, *(one.numel() for one in tensors), 0)
        else:
            size = math.prod(_common(tensors))
        # A file may say another shape than its numbers make: that is seen before memory is taken.
        empty = _call(operator, [one.to("meta") for one in tensors], "meta")
        if size > MOST or empty is None or not _stands_for(empty, result):
            return None
        made = _call(operator, tensors)
        if made is None:
            return None
        # A dim with a step of 0 repeats one element.
        for dim, step in enumerate(made.stride()):
            made = made.narrow(dim, 0, 1) if step == 0 and made.shape[dim] > 1 else made
        return made


def _stands_for(value: Tensor, result: Result) -> bool:
    """Whether a value has the type of a tensor and its shape, or 1 in place of some dims."""
    return (
        str(value.dtype) == f"torch.{result.dtype}"
        and len(value.shape) == len(result.shape)
        and all(own in (1, size) for own, size in zip(value.shape, result.shape, strict=True))
    )


def _filled(operator: Operator, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    fill = operator.attributes.get("fill_value", _FILLED[operator.kind])
    return torch.full(shape, fill, dtype=dtype) if isinstance(fill, bool | int | float) else None


def _whole_along(
    operator: Operator, tensors: list[Tensor], shapes: list[tuple[int, ...]]
) -> list[Tensor]:
    """The operands, whole along the dim that an operator works along, and equal in the others."""
    default = -1 if operator.kind == "aten.diff.default" else 0
    own = operator.attributes.get("dim", default)
    assert isinstance(own, int)
    rank = len(shapes[0])
    common = _common([one.narrow(own, 0, 1) for one in tensors])
    return [
        one.expand([shape[d] if d == own % rank else common[d] for d in range(rank)])
        for one, shape in zip(tensors, shapes, strict=True)
    ]


def _common(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape of what is elementwise of tensors."""
    shapes = [one.shape for one in tensors]
    return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[no-untyped-call]


def _deepened(value: Known, rank: int) -> Known:
    """The value with further dims in front."""
    if isinstance(value, Band):
        low = _in_front(value.low, rank)
        return replace(value, low=low, high=_in_front(value.high, rank))
    return _in_front(value, rank)


def _in_front(x: Tensor, rank: int) -> Tensor:
    return x.reshape((1,) * (rank - x.dim()) + tuple(x.shape))


def _band(operator: Operator, given: list[Known]) -> Band | None:
    """The result of an elementwise operator as a band, where it is one and its rule is known."""
    bands = [one for one in given if isinstance(one, Band)]
    if operator.kind in _AND and len(bands) == 2:
        return joined(*bands)
    if len(bands) == 1:
        # Inside the band all elements are equal, and so are those outside.
        if any(one.numel() > 1 for one in given if isinstance(one, Tensor)):
            return None
        # The number of dims decides which operand gives the type.
        shape = (1,) * bands[0].low.dim()
        inside, outside = (
            _call(operator, [one if isinstance(one, Tensor) else value for one in given])
            for value in (bands[0].inside.reshape(shape), bands[0].outside.reshape(shape))
        )
        if inside is None or outside is None:
            return None
        return replace(bands[0], inside=inside.reshape(()), outside=outside.reshape(()))
    if operator.kind in COMPARED and len(given) == 2 and not bands:
        return compared(operator.kind, *(one for one in given if isinstance(one, Tensor)))
    return None


def _call(operator: Operator, inputs: list[Tensor], device: str = "cpu") -> Tensor | None:
    """The result of an operator's function on a device; None if it has none there."""
    _, name, overload = operator.kind.split(".")
    function = getattr(getattr(torch.ops.aten, name), overload)
    arguments = {key: _argument(value, inputs) for key, value in operator.attributes.items()}
    for argument in function._schema.arguments:
        kind = str(argument.real_type)
        if "ScalarType" in kind and isinstance(arguments.get(argument.name), str):
            arguments[argument.name] = getattr(torch, arguments[argument.name])
        elif kind == "Device" or (kind == "Optional[Device]" and not inputs):
            arguments[argument.name] = torch.device(device)
    try:
        result: Tensor = function(**arguments)
    except RuntimeError:  # no kernel for the type, or values that are not allowed
        return None
    return result


def _argument(value: Value, inputs: list[Tensor]) -> Any:
    if isinstance(value, Ref):
        return inputs[value.index]
    return tuple(_argument(one, inputs) for one in value) if isinstance(value, tuple) else value
