"""`Symbol`: a tensor of the graph, with the methods and the rules of torch's tensors.

Each method writes down an operator in place of running it, so ONNX operators are defined here by
the same lines as in torch, without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, Union

import numpy as np

from autopar.errors import ModelError
from autopar.frontends.onnx.calls import Argument
from autopar.frontends.onnx.values import Val, dtype_name

from .trace import Trace

Number: TypeAlias = int | float | bool
Operand: TypeAlias = Union["Symbol", Number]
Shape: TypeAlias = tuple[int, ...]
_ORDER = (
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e4m3fn", "float8_e5m2"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
)
"""Element types: of two that meet, the later one is that of the result."""


def is_float(dtype: str) -> bool:
    """Whether an element type is one of real numbers."""
    return dtype.startswith(("float", "bfloat"))


def promoted(a: str, b: str) -> str:
    """The element type of a result of two others."""
    return max(a, b, key=_ORDER.index)


def broadcast(*shapes: Shape) -> Shape:
    """The shape that tensors of several shapes have together."""
    try:
        return tuple(np.broadcast_shapes(*shapes))
    except ValueError as error:
        raise ModelError(f"shapes {', '.join(map(str, shapes))} do not fit together") from error


class Symbol:
    """A tensor while a node is lowered."""

    __slots__ = ("trace", "val")

    def __init__(self, trace: Trace, val: Val) -> None:
        self.trace = trace
        self.val = val

    @property
    def shape(self) -> Shape:
        """The size of every dim."""
        return self.val.shape

    @property
    def dtype(self) -> str:
        """The element type, as a graph names it."""
        return dtype_name(self.val.dtype, f"the tensor {self.val.name!r}")

    @property
    def rank(self) -> int:
        """The number of dims."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return math.prod(self.shape)

    @property
    def floating(self) -> bool:
        """Whether the elements are real numbers."""
        return is_float(self.dtype)

    def new(
        self,
        kind: str,
        shape: Shape | None = None,
        dtype: str | None = None,
        /,
        **arguments: object,
    ) -> Symbol:
        """The result of an aten operator, with the shape and type of this tensor by default."""
        shape = self.shape if shape is None else shape
        return self.several(kind, [(shape, dtype or self.dtype)], **arguments)[0]

    def several(
        self, kind: str, results: Sequence[tuple[Shape, str]], /, **arguments: object
    ) -> tuple[Symbol, ...]:
        """The results of an operator, of aten where no other namespace is named."""
        given = {name: _plain(value) for name, value in arguments.items()}
        kind = kind if kind.startswith("autopar.") else f"aten.{kind}"
        return tuple(Symbol(self.trace, val) for val in self.trace.emit(kind, results, given))

    def constant(self, array: np.ndarray) -> Symbol:
        """A known value beside this tensor."""
        return Symbol(self.trace, self.trace.constant(array))

    # --- element by element ---

    def map(self, name: str, dtype: str | None = None, /, **arguments: object) -> Symbol:
        """An operator of every element alone."""
        return self.new(f"{name}.default", None, dtype, self=self, **arguments)

    def with_other(
        self, name: str, other: Operand, dtype: str | None = None, /, **arguments: object
    ) -> Symbol:
        """An operator of two tensors, or of a tensor and a number."""
        given = {"self": self, "other": other, **arguments}
        if isinstance(other, Symbol):
            shape = broadcast(self.shape, other.shape)
            return self.new(name, shape, dtype or _together(self, other), **given)
        return self.new(name, None, dtype or _with_number(self, other), **given)

    def __add__(self, other: Operand) -> Symbol:
        return self.with_other("add.Tensor", other)

    def __sub__(self, other: Operand) -> Symbol:
        return self.with_other("sub.Tensor", other)

    def __mul__(self, other: Operand) -> Symbol:
        return self.with_other("mul.Tensor", other)

    def __truediv__(self, other: Operand) -> Symbol:
        return self.with_other("div.Tensor", other)

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Number) -> Symbol:
        return self.with_other("rsub.Scalar", other)

    def __neg__(self) -> Symbol:
        return self.map("neg")

    def __pow__(self, other: Operand) -> Symbol:
        if isinstance(other, Symbol):
            shape = broadcast(self.shape, other.shape)
            dtype = _together(self, other)
            return self.new("pow.Tensor_Tensor", shape, dtype, self=self, exponent=other)
        dtype = _with_number(self, other)
        return self.new("pow.Tensor_Scalar", None, dtype, self=self, exponent=other)

    def compared(self, name: str, other: Operand) -> Symbol:
        """Whether a comparison (lt, le, gt, ge, eq, ne) holds."""
        overload = "Tensor" if isinstance(other, Symbol) else "Scalar"
        return self.with_other(f"{name}.{overload}", other, "bool")

    def __lt__(self, other: Operand) -> Symbol:
        return self.compared("lt", other)

    def __le__(self, other: Operand) -> Symbol:
        return self.compared("le", other)

    def __gt__(self, other: Operand) -> Symbol:
        return self.compared("gt", other)

    def __ge__(self, other: Operand) -> Symbol:
        return self.compared("ge", other)

    def equals(self, other: Operand) -> Symbol:
        """Whether elements are equal."""
        return self.compared("eq", other)

    def __and__(self, other: Symbol) -> Symbol:
        return self.with_other("logical_and.default", other, "bool")

    def __or__(self, other: Symbol) -> Symbol:
        return self.with_other("logical_or.default", other, "bool")

    def clamp(self, low: Number | None = None, high: Number | None = None) -> Symbol:
        """Values below `low` become it, those above `high` become that."""
        return self.map("clamp", min=low, max=high)

    def to(self, dtype: str) -> Symbol:
        """The same values of another element type."""
        if dtype == self.dtype:
            return self
        return self.new("to.dtype", None, dtype, self=self, dtype=dtype)

    def masked_fill(self, mask: Symbol, value: Number) -> Symbol:
        """The tensor with a number where a mask is true."""
        shape = broadcast(self.shape, mask.shape)
        return self.new("masked_fill.Scalar", shape, self=self, mask=mask, value=value)

    # --- moving ---

    def reshape(self, *shape: int) -> Symbol:
        """The elements in another shape; one size may be -1."""
        if -1 in shape:
            rest = -math.prod(shape)
            shape = tuple(self.size // rest if size == -1 else size for size in shape)
        if math.prod(shape) != self.size:
            raise ModelError(f"{self.shape} cannot be reshaped to {shape}")
        if shape == self.shape:
            return self
        return self.new("reshape.default", shape, self=self, shape=shape)

    def permute(self, *dims: int) -> Symbol:
        """The dims in another order."""
        if dims == tuple(range(self.rank)):
            return self
        shape = tuple(self.shape[dim] for dim in dims)
        return self.new("permute.default", shape, self=self, dims=dims)

    def transpose(self, first: int, second: int) -> Symbol:
        """The tensor with two dims exchanged."""
        order = list(range(self.rank))
        order[first], order[second] = order[second], order[first]
        return self.permute(*order)

    def unsqueeze(self, dim: int) -> Symbol:
        """The tensor with a new dim of size 1."""
        dim %= self.rank + 1
        shape = (*self.shape[:dim], 1, *self.shape[dim:])
        return self.new("unsqueeze.default", shape, self=self, dim=dim)

    def squeeze(self, *dims: int) -> Symbol:
        """The tensor without these dims of size 1."""
        dims = tuple(dim % self.rank for dim in dims)
        shape = tuple(size for dim, size in enumerate(self.shape) if dim not in dims)
        return self.new("squeeze.dims", shape, self=self, dim=dims)

    def expand(self, *shape: int) -> Symbol:
        """The tensor broadcast to a shape."""
        shape = broadcast(self.shape, shape)
        if shape == self.shape:
            return self
        return self.new("expand.default", shape, self=self, size=shape)

    def cut(self, dim: int, start: int, end: int, step: int = 1) -> Symbol:
        """The places from `start` to before `end` of a dim, counted from its beginning."""
        dim %= self.rank
        places = range(self.shape[dim])[start:end:step]
        if len(places) == self.shape[dim]:
            return self
        return self.new(
            "slice.Tensor",
            (*self.shape[:dim], len(places), *self.shape[dim + 1 :]),
            self=self,
            dim=dim,
            start=start,
            end=end,
            step=step,
        )

    def select(self, dim: int, index: int) -> Symbol:
        """One place of a dim, which goes."""
        dim %= self.rank
        shape = (*self.shape[:dim], *self.shape[dim + 1 :])
        return self.new("select.int", shape, self=self, dim=dim, index=index)

    def flip(self, dim: int) -> Symbol:
        """The tensor with a dim in reverse order."""
        return self.new("flip.default", self=self, dims=(dim % self.rank,))

    def split(self, sizes: Sequence[int], dim: int) -> tuple[Symbol, ...]:
        """Pieces of the sizes given along a dim."""
        dim %= self.rank
        if sum(sizes) != self.shape[dim]:
            raise ModelError(f"sizes {tuple(sizes)} do not add up to {self.shape[dim]}")
        before = self.shape[:dim]
        after = self.shape[dim + 1 :]
        return self.several(
            "split_with_sizes.default",
            [((*before, size, *after), self.dtype) for size in sizes],
            self=self,
            split_sizes=tuple(sizes),
            dim=dim,
        )

    def chunk(self, count: int, dim: int) -> tuple[Symbol, ...]:
        """Equal pieces along a dim."""
        return self.split([self.shape[dim] // count] * count, dim)

    def pad(self, before: Sequence[int], after: Sequence[int], value: Number = 0) -> Symbol:
        """The tensor grown (or, where negative, cropped) at both ends of its last dims."""
        flat = tuple(
            n for pair in zip(reversed(before), reversed(after), strict=True) for n in pair
        )
        while flat and flat[-2:] == (0, 0):
            flat = flat[:-2]
        if not flat:
            return self
        shape = list(self.shape)
        for i, (front, back) in enumerate(zip(before, after, strict=True)):
            shape[self.rank - len(before) + i] += front + back
        return self.new("constant_pad_nd.default", tuple(shape), self=self, pad=flat, value=value)

    def unfold(self, dim: int, size: int, step: int) -> Symbol:
        """Windows along a dim, their elements in a new last dim."""
        count = (self.shape[dim] - size) // step + 1
        shape = (*self.shape[:dim], count, *self.shape[dim + 1 :], size)
        return self.new("unfold.default", shape, self=self, dimension=dim, size=size, step=step)

    def repeat_interleave(self, count: int, dim: int) -> Symbol:
        """Every place of a dim so many times in a row."""
        shape = list(self.shape)
        shape[dim] *= count
        return (
            self.unsqueeze(dim + 1)
            .expand(*self.shape[: dim + 1], count, *self.shape[dim + 1 :])
            .reshape(*shape)
        )

    # --- by indices ---

    def wrapped(self, size: int) -> Symbol:
        """Indices counted from the start: negative ones count from the end."""
        places = self.to("int64")
        known = self.val.known()
        if known is not None and (not known.size or known.min() >= 0):
            return places
        return where(places < 0, places + size, places)

    def index_select(self, dim: int, index: Symbol) -> Symbol:
        """The places of a dim that a vector names."""
        dim %= self.rank
        shape = (*self.shape[:dim], *index.shape, *self.shape[dim + 1 :])
        return self.new("index_select.default", shape, self=self, dim=dim, index=index)

    def picked(self, dim: int, places: Sequence[int] | np.ndarray) -> Symbol:
        """Known places of a dim."""
        return self.index_select(dim, self.constant(np.array(places, np.int64)))

    def gather(self, dim: int, index: Symbol) -> Symbol:
        """For every index the element at its place along a dim."""
        return self.new("gather.default", index.shape, self=self, dim=dim % self.rank, index=index)

    def scatter(self, dim: int, index: Symbol, src: Symbol) -> Symbol:
        """A copy with each element of `src` written at its place along a dim."""
        return self.new("scatter.src", self=self, dim=dim % self.rank, index=index, src=src)

    def scatter_reduce(self, dim: int, index: Symbol, src: Symbol, how: str) -> Symbol:
        """A copy with each element of `src` combined (sum, prod, amax, amin) with its place."""
        arguments = {"dim": dim % self.rank, "index": index, "src": src, "reduce": how}
        return self.new("scatter_reduce.two", self=self, **arguments)

    # --- reductions ---

    def reduced(
        self, name: str, dims: Sequence[int], keep: bool = False, /, **arguments: object
    ) -> Symbol:
        """A reduction over dims."""
        dims = tuple(dim % self.rank for dim in dims)
        if not dims:
            return self
        shape = tuple(
            1 if dim in dims else size
            for dim, size in enumerate(self.shape)
            if keep or dim not in dims
        )
        return self.new(name, shape, self=self, dim=dims, keepdim=keep or None, **arguments)

    def sum(self, *dims: int, keep: bool = False) -> Symbol:
        """The sum over dims."""
        given = {} if self.floating else {"dtype": self.dtype}
        return self.reduced("sum.dim_IntList", dims, keep, **given)

    def mean(self, *dims: int, keep: bool = False) -> Symbol:
        """The mean over dims."""
        return self.reduced("mean.dim", dims, keep)

    def amax(self, *dims: int, keep: bool = False) -> Symbol:
        """The largest value over dims."""
        return self.reduced("amax.default", dims, keep)

    def amin(self, *dims: int, keep: bool = False) -> Symbol:
        """The smallest value over dims."""
        return self.reduced("amin.default", dims, keep)

    def prod(self, dim: int, keep: bool = False) -> Symbol:
        """The product over one dim."""
        dim %= self.rank
        shape = (*self.shape[:dim], *((1,) if keep else ()), *self.shape[dim + 1 :])
        given = {} if self.floating else {"dtype": self.dtype}
        return self.new("prod.dim_int", shape, self=self, dim=dim, keepdim=keep or None, **given)

    def along(self, name: str, dim: int) -> Symbol:
        """An operator along a dim, which stays."""
        return self.new(name, self=self, dim=dim % max(self.rank, 1))

    # --- products ---

    def __matmul__(self, other: Symbol) -> Symbol:
        left = self.shape if self.rank > 1 else (1, *self.shape)
        right = other.shape if other.rank > 1 else (*other.shape, 1)
        if left[-1] != right[-2]:
            raise ModelError(f"{self.shape} and {other.shape} cannot be multiplied")
        shape = (
            *broadcast(left[:-2], right[:-2]),
            *(left[-2:-1] if self.rank > 1 else ()),
            *(right[-1:] if other.rank > 1 else ()),
        )
        return self.new("matmul.default", shape, _together(self, other), self=self, other=other)

    @property
    def t(self) -> Symbol:
        """The tensor with its last two dims exchanged."""
        return self.transpose(-2, -1)


def _plain(value: object) -> Argument:
    """An argument as a record has it."""
    if isinstance(value, Symbol):
        return value.val
    if isinstance(value, tuple) and value and all(isinstance(item, Symbol) for item in value):
        return tuple(item.val for item in value)
    return value  # type: ignore[return-value]


def _together(a: Symbol, b: Symbol) -> str:
    """The type of a result of two tensors; one without dims does not widen its kind of number."""
    if _kind(a.dtype) == _kind(b.dtype) and bool(a.rank) != bool(b.rank):
        return a.dtype if a.rank else b.dtype
    return promoted(a.dtype, b.dtype)


def _kind(dtype: str) -> str:
    return "float" if is_float(dtype) else dtype.strip("u0123456789")


def _with_number(a: Symbol, number: Number) -> str:
    if isinstance(number, float) and not a.floating and not a.dtype.startswith("complex"):
        return "float32"
    return "int64" if a.dtype == "bool" and not isinstance(number, bool) else a.dtype


def where(condition: Symbol, yes: Symbol, no: Operand) -> Symbol:
    """Elements of one tensor or another (or a number), by a condition."""
    if isinstance(no, Symbol):
        shape = broadcast(condition.shape, yes.shape, no.shape)
        arguments: Mapping[str, object] = {"condition": condition, "self": yes, "other": no}
        return yes.new("where.self", shape, _together(yes, no), **arguments)
    shape = broadcast(condition.shape, yes.shape)
    arguments = {"condition": condition, "self": yes, "other": no}
    return yes.new("where.ScalarOther", shape, **arguments)


def cat(tensors: Sequence[Symbol], dim: int) -> Symbol:
    """Tensors joined along a dim."""
    first = tensors[0]
    dim %= first.rank
    total = sum(tensor.shape[dim] for tensor in tensors)
    shape = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    if len(tensors) == 1:
        return first
    return first.new("cat.default", shape, tensors=tuple(tensors), dim=dim)


def stack(tensors: Sequence[Symbol], dim: int) -> Symbol:
    """Tensors along a new dim."""
    first = tensors[0]
    dim %= first.rank + 1
    shape = (*first.shape[:dim], len(tensors), *first.shape[dim:])
    return first.new("stack.default", shape, tensors=tuple(tensors), dim=dim)
