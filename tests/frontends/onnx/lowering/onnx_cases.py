"""Random models of one operator: inputs and attributes drawn, arguments that decide shapes as
initializers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import ModelProto, helper, numpy_helper

Generator = np.random.Generator
OPSET = 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """An operator with its inputs in order (None: left out) and its attributes; `stored` are the
    positions of initializers.
    """

    kind: str
    inputs: Sequence[np.ndarray | None]
    attributes: Mapping[str, Any]
    stored: Sequence[int] = ()
    outputs: int = 1
    opset: int = OPSET

    def model(self) -> ModelProto:
        """The model of the operator alone."""
        names = [f"x{i}" if item is not None else "" for i, item in enumerate(self.inputs)]
        results = [f"y{i}" for i in range(self.outputs)]
        node = helper.make_node(self.kind, names, results, name="node", **self.attributes)
        given = [(i, item) for i, item in enumerate(self.inputs) if item is not None]
        graph = helper.make_graph(
            [node],
            self.kind,
            [
                helper.make_tensor_value_info(
                    names[i], helper.np_dtype_to_tensor_dtype(item.dtype), item.shape
                )
                for i, item in given
                if i not in self.stored
            ],
            [helper.make_empty_tensor_value_info(name) for name in results],
            [numpy_helper.from_array(item, names[i]) for i, item in given if i in self.stored],
        )
        ir_version = 7 if self.opset <= 14 else 10
        return helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=ir_version
        )

    def feeds(self) -> dict[str, np.ndarray]:
        """The values of the model's inputs."""
        return {
            f"x{i}": np.asarray(item)
            for i, item in enumerate(self.inputs)
            if item is not None and i not in self.stored
        }


def shape(rng: Generator, low: int = 1, high: int = 4, most: int = 5) -> tuple[int, ...]:
    """Between `low` and `high` dims of up to `most` elements."""
    return tuple(int(n) for n in rng.integers(1, most + 1, rng.integers(low, high + 1)))


def floats(rng: Generator, size: Sequence[int], *, positive: bool = False) -> np.ndarray:
    """Normal numbers."""
    values = rng.standard_normal(tuple(size))
    return np.asarray(np.abs(values) + 0.1 if positive else values, np.float32)


def booleans(rng: Generator, size: Sequence[int]) -> np.ndarray:
    """Truths and falsehoods."""
    return np.asarray(rng.random(tuple(size)) < 0.5)


def ints(
    rng: Generator, low: int, high: int, size: Sequence[int], dtype: type = np.int64
) -> np.ndarray:
    """Integers from `low` to below `high`."""
    return rng.integers(low, high, tuple(size)).astype(dtype)


def broadcast(rng: Generator) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes that go together."""
    full = shape(rng, 2, 4)
    cut = tuple(1 if rng.random() < 0.3 else n for n in full)[int(rng.integers(0, 3)) :]
    return (full, cut) if rng.random() < 0.5 else (cut, full)


def axis_of(rng: Generator, rank: int) -> int:
    return int(rng.integers(-rank, rank))
