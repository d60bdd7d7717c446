"""`Trace`: where the aten operators that one ONNX node becomes are written down."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.frontends.onnx.builder import Record
from autopar.frontends.onnx.calls import Argument
from autopar.frontends.onnx.values import Val, constant, dtype_name

CODES = {dtype_name(code, ""): code for code in (*range(26, 0, -1),) if code != 8}
"""Element type by its name in a graph → its ONNX number, of several the lowest."""


class Trace:
    """The operators of one node so far, and the values that they make.

    `shared`: what nodes of the same model make once for all of them, by what it is: constants, and
    what follows from nothing else. The values stand in it by themselves, too.
    """

    def __init__(self, label: str, shared: dict[Hashable, Val]) -> None:
        self.label = label
        self.shared = shared
        self.records: list[Record] = []
        self.constants: list[Val] = []

    def emit(
        self,
        kind: str,
        results: Sequence[tuple[tuple[int, ...], str]],
        arguments: Mapping[str, Argument],
    ) -> list[Val]:
        """Write down an operator; `results`: the shape and element type of each result."""
        short = kind.split(".")[1]
        name = f"{self.label}/{short}"
        given: dict[str, Argument] = {k: v for k, v in arguments.items() if v is not None}
        key = (kind, *given.items())
        if self._is_known(given.values()) and "rand" not in short:
            if (known := self.shared.get(key)) is not None:
                return [known]
        else:
            key = ()
        outputs = [Val(name, CODES[dtype], shape) for shape, dtype in results]
        self.records.append(Record(name=name, kind=kind, arguments=given, outputs=outputs))
        if key and len(outputs) == 1:
            self.shared[key] = self.shared[outputs[0]] = outputs[0]
        return outputs

    def _is_known(self, values: Iterable[Argument]) -> bool:
        """Whether an operator reads shared values, and no others."""
        tensors = [value for value in values if isinstance(value, Val)]
        return bool(tensors) and all(value in self.shared for value in tensors)

    def constant(self, array: np.ndarray) -> Val:
        """A value that is known before anything runs."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.shared:
            made = constant(f"{self.label}/constant", array)
            self.constants.append(made)
            self.shared[key] = self.shared[made] = made
        return self.shared[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Facts of a node beside its arguments: the outputs that are used, and its version."""

    trace: Trace
    outputs: Sequence[Val]
    version: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first output."""
        return self.outputs[0].shape

    @property
    def code(self) -> int:
        """ONNX's number of the first output's element type."""
        return self.outputs[0].dtype
