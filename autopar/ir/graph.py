"""`Graph`, `Operator` and `Tensor`: what both frontends produce and everything after them reads."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

import numpy as np

# Bytes per element of every dtype that a tensor may have (names as in torch, without the prefix).
DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint64": 8,
    "uint32": 4,
    "uint16": 2,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}


class Role(StrEnum):
    """A tensor's role in the model."""

    INPUT = "input"
    PARAMETER = "parameter"
    CONSTANT = "constant"
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True)
class Ref:
    """Placeholder inside an operator's attributes for the tensor `inputs[index]`."""

    index: int


Scalar = int | float | bool | str | None
Value: TypeAlias = "Scalar | Ref | tuple[Value, ...]"


@dataclass(frozen=True, slots=True, kw_only=True)
class NarrowCopy:
    """The form in which a parameter is gathered and read, if that is narrower than its dtype.

    `recipe`: by name (`autopar.ir.recipes`). `bits` of an element. `blocks`: elements along each
    dim that share a scale; `over`: those that share a scale over these scales, if there is one.
    """

    recipe: str
    bits: int
    blocks: tuple[int, ...]
    over: tuple[int, ...] = ()

    @property
    def levels(self) -> tuple[tuple[int, ...], ...]:
        """The blocks of each kind of scale."""
        return (self.blocks, self.over) if self.over else (self.blocks,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A value of the graph: `shape` in elements, `dtype` one of `DTYPE_BYTES`.

    `narrow`: the copy of a parameter that operators read in its place.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: Role = Role.ACTIVATION
    trainable: bool = False
    narrow: NarrowCopy | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"tensor {self.name!r}: unknown dtype {self.dtype!r}; valid are "
                f"{', '.join(DTYPE_BYTES)}"
            )
        if any(size < 0 for size in self.shape):
            raise ValueError(f"tensor {self.name!r}: negative size in shape {self.shape}")

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Size in bytes as it is read: of its narrow copy, if it has one."""
        return self.own_bytes if self.narrow is None else self.size * self.narrow.bits // 8

    @property
    def own_bytes(self) -> int:
        """Size in bytes in its dtype, in which gradients are made."""
        return self.size * DTYPE_BYTES[self.dtype]

    @property
    def is_float(self) -> bool:
        """Whether the dtype can carry a gradient."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One call of an operator.

    `kind` is the spelling of its source: `aten.linear.default`, `aten.matmul.default`,
    `autopar.mean_square`.

    `attributes` holds every other argument by its formal name; a `Ref` into `inputs` marks the
    place of a tensor. ONNX inputs that are constants needed to know shapes (`shape`, `axes`, ...)
    are folded into attributes too.
    """

    name: str
    kind: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Mapping[str, Value] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A model: operators in topological order over named tensors.

    `constants` holds the values of small folded constants; parameters and large constants stay in
    the model file or module. `loss` names the scalar output to differentiate when the model is
    trained. `replicated` names operator kinds without a rule that the user asked every device to
    compute whole. `updates` maps each constant that a run of the model changes (running statistics,
    counters) to the tensor with its new value.
    """

    name: str
    tensors: Mapping[str, Tensor]
    operators: tuple[Operator, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    constants: Mapping[str, np.ndarray] = field(default_factory=dict)
    loss: str | None = None
    replicated: frozenset[str] = frozenset()
    updates: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError(f"graph {self.name!r} is not well formed: " + "; ".join(problems[:10]))

    def _problems(self) -> list[str]:
        known = {
            name for name, tensor in self.tensors.items() if tensor.role is not Role.ACTIVATION
        }
        names: set[str] = set()
        out = [f"input {name!r} is unknown" for name in self.inputs if name not in self.tensors]
        for operator in self.operators:
            if operator.name in names:
                out.append(f"two operators are called {operator.name!r}")
            names.add(operator.name)
            out += [
                f"{operator.name!r} reads {name!r} before it is made"
                for name in operator.inputs
                if name not in known
            ]
            out += [
                f"{operator.name!r} makes {name!r} a second time"
                for name in operator.outputs
                if name in known
            ]
            out += [
                f"{operator.name!r} makes the undeclared {name!r}"
                for name in operator.outputs
                if name not in self.tensors
            ]
            known.update(operator.outputs)
        out += [
            f"{name!r} is updated and is no constant"
            for name in self.updates
            if self.tensors[name].role is not Role.CONSTANT
        ]
        wanted = (*self.outputs, *self.updates.values(), *((self.loss,) if self.loss else ()))
        return out + [f"output {name!r} is never made" for name in wanted if name not in known]

    @property
    def parameters(self) -> tuple[Tensor, ...]:
        """Trainable and frozen parameters, in the order of declaration."""
        return tuple(tensor for tensor in self.tensors.values() if tensor.role is Role.PARAMETER)

    def consumers(self) -> dict[str, list[tuple[int, int]]]:
        """The readers of every tensor, in order, as (operator index, input index) pairs."""
        readers: dict[str, list[tuple[int, int]]] = {}
        for index, operator in enumerate(self.operators):
            for position, name in enumerate(operator.inputs):
                readers.setdefault(name, []).append((index, position))
        return readers

    def producers(self) -> dict[str, tuple[int, int]]:
        """The (operator index, output index) of every tensor that an operator makes."""
        return {
            name: (i, o)
            for i, operator in enumerate(self.operators)
            for o, name in enumerate(operator.outputs)
        }

    def operator_fingerprint(self, operator: Operator) -> str:
        """Hash of an operator's kind, attributes, shapes and dtypes, without any name."""
        around = [
            (self.tensors[n].shape, self.tensors[n].dtype, str(self.tensors[n].role))
            for n in (*operator.inputs, *operator.outputs)
        ]
        text = repr(
            (operator.kind, sorted(operator.attributes.items(), key=lambda item: item[0]), around)
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def fingerprint(self) -> str:
        """Hash of the whole model: operators, names, how they are joined, parameters and inputs."""
        digest = hashlib.sha256()
        for name in self.inputs:
            digest.update(repr((name, self.tensors[name].shape, self.tensors[name].dtype)).encode())
        for tensor in self.parameters:
            digest.update(
                repr((tensor.name, tensor.shape, tensor.dtype, tensor.trainable)).encode()
            )
        for operator in self.operators:
            digest.update(
                repr(
                    (
                        operator.name,
                        operator.inputs,
                        operator.outputs,
                        self.operator_fingerprint(operator),
                    )
                ).encode()
            )
        digest.update(repr((self.outputs, self.loss, *sorted(self.updates.items()))).encode())
        return digest.hexdigest()[:32]


def unused_name(name: str, taken: Container[str], joint: str = "_") -> str:
    """The name, with a number after it where it is taken."""
    tries = (f"{name}{joint}{i}" if i else name for i in itertools.count())
    return next(fresh for fresh in tries if fresh not in taken)


def needed_operators(operators: Sequence[Operator], wanted: Iterable[str]) -> tuple[Operator, ...]:
    """The operators, in their order, that lead to the tensors `wanted`."""
    needed = set(wanted)
    chosen = []
    for operator in reversed(operators):
        if not needed.isdisjoint(operator.outputs):
            needed.update(operator.inputs)
            chosen.append(operator)
    return tuple(reversed(chosen))
