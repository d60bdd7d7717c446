"""Binds the symbolic dims of a model's inputs to sizes: by name, by input shape, by batch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from autopar.errors import ModelError, UsageError, unknown

Dim = int | str | None


class Place(str):
    """The name of a dim without one: its input and its place there."""


_TOKEN = re.compile(r"\s*(?:(\d+)|([^\W\d][\w.]*)|(//|\*\*|[-+*/%(),]))")
_CALLS: Mapping[str, Callable[..., int]] = {"max": max, "min": min, "Max": max, "Min": min}


class _Expression:
    """A recursive descent parser that evaluates an integer expression over named sizes.

    >>> _Expression("2*(s16 + s62)//3", {"s16": 4, "s62": 5}).value()
    6
    """

    def __init__(self, text: str, sizes: Mapping[str, int]) -> None:
        self.text = text
        self.sizes = sizes
        self.position = 0
        self.tokens: list[str] = []
        start = 0
        stripped = text.rstrip()
        while start < len(stripped):
            match = _TOKEN.match(stripped, start)
            if match is None:
                raise ModelError(
                    f"the dim {text!r} is neither a name nor an expression of names: give --shape "
                    "INPUT=1x30"
                )
            self.tokens.append(match.group().strip())
            start = match.end()

    def _peek(self) -> str:
        return self.tokens[self.position] if self.position < len(self.tokens) else ""

    def _next(self) -> str:
        token = self._peek()
        self.position += 1
        return token

    def value(self) -> int:
        """The size to which the whole text evaluates."""
        result = self._sum()
        if self._peek():
            raise ModelError(f"the dim {self.text!r} cannot be evaluated at {self._peek()!r}")
        return result

    def _sum(self) -> int:
        result = self._product()
        while self._peek() in ("+", "-"):
            result = result + self._product() if self._next() == "+" else result - self._product()
        return result

    def _product(self) -> int:
        result = self._atom()
        while self._peek() in ("*", "/", "//", "%"):
            sign = self._next()
            other = self._atom()
            if sign == "*":
                result *= other
                continue
            if other == 0 or (sign == "/" and result % other):
                raise ModelError(
                    f"the dim {self.text!r} is not a whole number for {dict(self.sizes)}"
                )
            result = result % other if sign == "%" else result // other
        return result

    def _atom(self) -> int:
        token = self._next()
        if token == "-":
            return -self._atom()
        if token == "(":
            result = self._sum()
            self._expect(")")
            return result
        if token.isdigit():
            return int(token)
        if token in _CALLS and self._peek() == "(":
            self._next()
            arguments = [self._sum()]
            while self._peek() == ",":
                self._next()
                arguments.append(self._sum())
            self._expect(")")
            return _CALLS[token](*arguments)
        if token in self.sizes:
            return self.sizes[token]
        raise ModelError(f"the dim {self.text!r} cannot be evaluated at {token or 'its end'!r}")

    def _expect(self, token: str) -> None:
        if self._next() != token:
            raise ModelError(f"the dim {self.text!r} lacks a {token!r}")


def symbols(text: str) -> tuple[str, ...]:
    """The names in a dim's text, in order of appearance.

    >>> symbols("s16 + 2*s62")
    ('s16', 's62')
    """
    if isinstance(text, Place):
        return (text,)
    names = [
        match.group(2)
        for match in _TOKEN.finditer(text)
        if match.group(2) and match.group(2) not in _CALLS
    ]
    return tuple(dict.fromkeys(names)) or (text,)


@dataclass(kw_only=True)
class Binding:
    """The inputs' sizes; `old_batch` is the batch written in the file where `batch` replaced it."""

    shapes: dict[str, tuple[int, ...]]
    written: dict[str, tuple[int, ...]] = field(default_factory=dict)
    old_batch: int | None = None


class _Binder:
    def __init__(
        self, inputs: Mapping[str, tuple[Dim, ...] | None], dims: Mapping[str, int]
    ) -> None:
        self.inputs = {
            name: shape
            and tuple(Place(f"{name}.{i}") if dim is None else dim for i, dim in enumerate(shape))
            for name, shape in inputs.items()
        }
        self.sizes: dict[str, int] = {}
        self.names = sorted(
            {
                name
                for shape in self.inputs.values()
                for dim in shape or ()
                if isinstance(dim, str)
                for name in symbols(dim)
            }
        )
        for name, size in dims.items():
            if name not in self.names:
                fixed = f"the model's inputs have no dim called {name!r}: all are fixed"
                raise UsageError(unknown("dim", name, self.names) if self.names else fixed)
            self.bind(name, size)

    def bind(self, name: str, size: int) -> None:
        if size < 1:
            raise UsageError(f"the dim {name!r} cannot have size {size}")
        if self.sizes.setdefault(name, size) != size:
            raise UsageError(f"the dim {name!r} is given two sizes, {self.sizes[name]} and {size}")

    def use_shape(self, name: str, given: tuple[int, ...]) -> None:
        if name not in self.inputs:
            raise UsageError(unknown("input", name, self.inputs))
        shape = self.inputs[name]
        if any(size < 1 for size in given):
            raise UsageError(f"the shape {given} of input {name!r} must be positive")
        if shape is not None and len(shape) != len(given):
            raise UsageError(
                f"input {name!r} has {len(shape)} dims, the shape {given} has {len(given)}"
            )
        for dim, size in zip(shape or (), given, strict=False):
            if isinstance(dim, int) and dim != size:
                raise UsageError(
                    f"input {name!r} is fixed at {shape} in the file, the shape {given} does not "
                    "fit"
                )
            if isinstance(dim, str) and symbols(dim) == (dim,):
                self.bind(dim, size)
        self.inputs[name] = given

    def use_batch(self, batch: int) -> int | None:
        """Give `batch` to the leading dims and return the file's common batch.

        A leading dim takes it if it is symbolic or has the common batch.
        """
        if batch < 1:
            raise UsageError(f"the batch cannot be {batch}")
        for shape in self.inputs.values():
            if shape and isinstance(shape[0], str) and symbols(shape[0]) == (shape[0],):
                self.bind(shape[0], batch)
        fixed = [shape[0] for shape in self.inputs.values() if shape and isinstance(shape[0], int)]
        if (
            any(shape and type(shape[0]) is str for shape in self.inputs.values())
            or not fixed
            or set(fixed) == {batch}
        ):
            return None
        old = Counter(fixed).most_common(1)[0][0]
        self.inputs.update(
            {
                name: (batch, *shape[1:])
                for name, shape in self.inputs.items()
                if shape and shape[0] == old
            }
        )
        return old

    def unbound(self) -> list[str]:
        """The missing sizes, as options of the command line."""
        names = []
        shapes = []
        for name, shape in self.inputs.items():
            missing = [
                part
                for dim in shape or ()
                if isinstance(dim, str)
                for part in symbols(dim)
                if part not in self.sizes
            ]
            names += [part for part in missing if part not in names]
            if shape is None:
                shapes.append(f"--shape {name}=1x30")
        return [f"--dim {name}=SIZE" for name in names] + shapes

    def resolve(self, dim: Dim) -> int:
        if isinstance(dim, int):
            return dim
        assert dim is not None, "unbound() is empty"
        return self.sizes[dim] if dim in self.sizes else _Expression(dim, self.sizes).value()


def bind_dims(
    inputs: Mapping[str, tuple[Dim, ...] | None],
    *,
    dims: Mapping[str, int],
    batch: int | None,
    shapes: Mapping[str, tuple[int, ...]],
) -> Binding:
    """Sizes for every input, or an error that names every dim which is still open.

    >>> bind_dims({"ids": ("batch", 30)}, dims={"batch": 4}, batch=None, shapes={}).shapes
    {'ids': (4, 30)}
    """
    binder = _Binder(inputs, dims)
    for name, given in shapes.items():
        binder.use_shape(name, tuple(given))
    before = dict(binder.inputs)
    old_batch = binder.use_batch(batch) if batch is not None else None
    open_dims = binder.unbound()
    if open_dims:
        raise ModelError("the model's inputs leave sizes open; give " + " ".join(open_dims))
    bound = {
        name: tuple(binder.resolve(dim) for dim in shape or ())
        for name, shape in binder.inputs.items()
    }
    negative = [
        f"{name} {shape}"
        for name, shape in bound.items()
        if math.prod(shape) < 0 or any(size < 0 for size in shape)
    ]
    if negative:
        raise ModelError("inputs with a negative size: " + ", ".join(negative))
    if old_batch is not None:
        written = {
            name: tuple(binder.resolve(dim) for dim in shape or ())
            for name, shape in before.items()
        }
    else:
        written = {}
    return Binding(shapes=bound, written=written, old_batch=old_batch)
