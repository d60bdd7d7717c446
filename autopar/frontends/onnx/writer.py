"""`Writer`: spells a node by operators of the ONNX standard, which stand in its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from onnx import NodeProto, helper

from autopar.errors import ModelError

from .model import kind_of
from .nodes import label
from .values import Val, constant, dtype_name

STANDARD = 23
"""The opset of the standard operators that are written."""


class Importer(Protocol):
    """The part of the importer that is used: values by name, and operators that are processed."""

    env: dict[str, Val | list[Val]]
    used: set[str]

    def value(self, node: NodeProto, name: str) -> Val: ...
    def apply_standard(self, node: NodeProto) -> None: ...
    def unique(self, name: str) -> str: ...


class Writer:
    """Writes standard operators in place of a node; values are names, as in a file."""

    def __init__(self, importer: Importer, node: NodeProto) -> None:
        self.importer = importer
        self.node = node
        self.label = label(node)
        self.given = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        self.count = 0

    # --- what the node has ---

    def input(self, place: int) -> str:
        """The name of an input, "" where it is left out."""
        return self.node.input[place] if place < len(self.node.input) else ""

    def inputs(self, names: str) -> list[str]:
        """The first inputs, as many as there are words in `names`."""
        return [self.input(place) for place in range(len(names.split()))]

    def attribute(self, name: str, default: Any) -> Any:
        """An attribute, or its default."""
        value = self.given.get(name, default)
        return value.decode() if isinstance(value, bytes) else value

    def wanted(self, place: int) -> bool:
        """Whether an output is asked for."""
        return place < len(self.node.output) and bool(self.node.output[place])

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value."""
        return self.importer.value(self.node, name).shape

    def dtype(self, name: str) -> int:
        """ONNX's number of the element type of a value."""
        return self.importer.value(self.node, name).dtype

    def known(self, name: str) -> np.ndarray | None:
        """A value that is known while the model is read."""
        return self.importer.value(self.node, name).known() if name else None

    def refuse(self, reason: str) -> ModelError:
        """An error that names the node."""
        return ModelError(f"node {self.label!r} ({kind_of(self.node)}) {reason}")

    # --- what is written ---

    def constant(self, value: Any, like: str | int = 7) -> str:
        """A known value, of the element type of another value, or of ONNX's number of one."""
        code = self.dtype(like) if isinstance(like, str) else like
        name = self.fresh("constant")
        held = dtype_name(code, self.label)
        # numpy has no bfloat16: such a number is cast from single precision.
        array = np.array(value, "float32" if held == "bfloat16" else held)
        self.importer.env[name] = constant(self.importer.unique(name), array)
        return self("Cast", name, to=code) if held == "bfloat16" else name

    def hold(self, value: Val | list[Val]) -> str:
        """A name for a value."""
        name = self.fresh("held")
        self.importer.env[name] = value
        return name

    def __call__(
        self, kind: str, *inputs: str, to: int | None = None, outputs: int = 1, **attributes: Any
    ) -> Any:
        """Write an operator; its output's name, or several. See `last` for the node's own."""
        if kind == "Cast":
            attributes["to"] = to
        names = [self.fresh(kind) for _ in range(outputs)]
        self._apply(kind, inputs, names, self.importer.unique(f"{self.label}/{kind}"), attributes)
        return names[0] if outputs == 1 else names

    def last(self, kind: str, *inputs: str, place: int = 0, **attributes: Any) -> None:
        """Write the operator whose result is an output of the node, which it is named by."""
        if self.wanted(place):
            name = self.label if place == 0 else f"{self.label}/{self.node.output[place]}"
            self._apply(kind, inputs, [self.node.output[place]], name, attributes)

    def fresh(self, kind: str) -> str:
        """A name for a value that the node makes on its way."""
        self.count += 1
        return f"{self.label}/{kind}:{self.count}"

    def _apply(
        self,
        kind: str,
        inputs: Sequence[str],
        outputs: Sequence[str],
        name: str,
        attributes: dict[str, Any],
    ) -> None:
        present = {key: value for key, value in attributes.items() if value is not None}
        self.importer.used.update(outputs)
        self.importer.apply_standard(helper.make_node(kind, inputs, outputs, name=name, **present))

    # --- short forms ---

    def reshape(self, x: str, *shape: int) -> str:
        """The elements in another shape."""
        made: str = self("Reshape", x, self.constant(shape))
        return made

    def cut(self, x: str, axis: int, start: int, end: int) -> str:
        """A range of a dim."""
        numbers = [self.constant([n]) for n in (start, end, axis)]
        made: str = self("Slice", x, *numbers)
        return made

    def split(self, x: str, sizes: Sequence[int], axis: int = -1) -> list[str]:
        """Pieces along a dim."""
        if len(sizes) == 1:
            return [x]
        made: list[str] = self("Split", x, self.constant(sizes), axis=axis, outputs=len(sizes))
        return made

    def cast(self, x: str, like: str) -> str:
        """The values in the element type of another."""
        made: str = self("CastLike", x, like)
        return made
