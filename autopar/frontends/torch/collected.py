"""`Collected`: the tensors and operators of a graph that is being read, under stable names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from autopar.ir import Operator, Ref, Role, Tensor, Value

from .assertions import place_of
from .folding import CALL


def settled_size(size: int | torch.SymInt) -> int | None:
    """A size as a number, also one that the program's own operators leave no choice of."""
    if isinstance(size, int):
        return int(size)
    node = size.node
    known = node.shape_env.simplify(node.expr) if node.shape_env is not None else node.expr
    return int(known) if known.is_number else None


class Collected:
    """Tensors, operators and buffers so far, and what of the program cannot be read (`problems`).

    `values`: the tensor's name, the number or the module behind each fx node.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.operators: list[Operator] = []
        self.names: set[str] = set()
        self.counts: dict[str, int] = {}
        self.values: dict[torch.fx.Node, Any] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.buffers: list[str] = []
        # A buffer → the tensor with its new value.
        self.updates: dict[str, str] = {}
        self.problems: list[str] = []
        # Tensors whose sizes depend on data, and the code that made the first of them.
        self.unsettled: list[str] = []
        self.place = ""

    def attribute_constant(self, node: torch.fx.Node) -> None:
        """Declare a tensor that the program holds as an attribute, once for all its readers."""
        value = self.values[node]
        name = str(node.target)
        self.values[node] = name
        if name not in self.tensors:
            self.constants[name] = value
            self.declare(name, value, Role.CONSTANT)

    def complex_constant(self, node: torch.fx.Node, argument: str, value: complex) -> str:
        """A complex number as a constant, of the type that it gives the result of its operator."""
        name = f"{node.name}.{argument}"
        self.constants[name] = torch.tensor(value, dtype=node.meta["val"].dtype)
        self.declare(name, self.constants[name], Role.CONSTANT)
        return name

    def declare(
        self,
        name: str,
        value: torch.Tensor,
        role: Role = Role.ACTIVATION,
        *,
        trainable: bool = False,
    ) -> None:
        """Note a tensor of the graph, with the shape and dtype of `value`."""
        sizes = [settled_size(size) for size in value.shape]
        shape = tuple(self._dynamic(name) if size is None else size for size in sizes)
        self.tensors[name] = Tensor(
            name=name,
            shape=shape,
            dtype=str(value.dtype).removeprefix("torch."),
            role=role,
            trainable=trainable,
        )

    def _dynamic(self, name: str) -> int:
        self.unsettled.append(name)
        return 0

    def unsettled_sizes(self) -> list[str]:
        """Words for sizes that depend on data."""
        if not self.unsettled:
            return []
        more = len(set(self.unsettled)) - 1
        others = f", as {more} more have" if more else ""
        return [
            f"tensor {self.unsettled[0]!r} has a size that depends on data ({self.place}){others}: "
            "keep all rows and mask them by torch.where, or select them before the model is called"
        ]

    def results(self, node: torch.fx.Node, name: str) -> str | list[str]:
        """Declare the results of a node: one tensor, or several."""
        results: Any = node.meta.get("val")
        many = isinstance(results, (tuple, list))
        outputs = [f"{name}:{i}" for i in range(len(results))] if many else [f"{name}:0"]
        for output, value in zip(outputs, results if many else [results], strict=True):
            if isinstance(value, torch.Tensor):
                self.declare(output, value)
            else:
                self.problems.append(f"{node.name!r} ({node.target}) gives a number, not a tensor")
        if self.unsettled and not self.place:
            self.place = place_of(node)
        return outputs if many else outputs[0]

    def statistics(self, name: str, running: Sequence[torch.fx.Node]) -> list[str]:
        """Declare the further results of a batch norm.

        The batch's mean and deviation, then the new running ones.
        """
        made = [f"{name}:{i}" for i in range(1, 5)]
        for index, out in enumerate(made):
            old = running[index % 2]
            before = self.values[old]
            self.tensors[out] = replace(self.tensors[before], name=out, role=Role.ACTIVATION)
            if index > 1:
                buffer = self.buffer_of(before)
                self.values[old] = out
                if buffer is not None:
                    self.updates[buffer] = out
        return made

    def buffer_of(self, name: str) -> str | None:
        """The buffer whose current value a tensor is."""
        first = next((buffer for buffer, value in self.updates.items() if value == name), name)
        return first if first in self.buffers else None

    def detached(self, name: Any) -> Any:
        """The result of a `no_grad` region.

        Where it depends on a trainable parameter, no gradient passes it. The inputs of a layer that
        is exported on its own may depend on one, and its call stands for its parameters.
        """
        warm = {t.name for t in self.tensors.values() if t.trainable or t.role is Role.INPUT}
        for op in self.operators:
            if op.kind == CALL or warm.intersection(op.inputs):
                warm.update(op.outputs)
        if name not in warm or not self.tensors[name].is_float:
            return name
        called = self._unique(f"{name.rpartition(':')[0] or name}.detach")
        out = f"{called}:0"
        self.tensors[out] = replace(
            self.tensors[name], name=out, role=Role.ACTIVATION, trainable=False
        )
        self.derived("aten.detach.default", called, name, out, {"self": Ref(0)})
        return out

    def derived(
        self, kind: str, called: str, source: str, out: str, attributes: Mapping[str, Value]
    ) -> None:
        """Add an operator that no node stands for, of one tensor."""
        operator = Operator(
            name=called, kind=kind, inputs=(source,), outputs=(out,), attributes=attributes
        )
        self.operators.append(operator)

    def operator_name(self, node: torch.fx.Node) -> str:
        """`module.path/op`, numbered within its module, so that other layers do not change it."""
        stack = node.meta.get("nn_module_stack") or {}
        if stack:
            path = next((entry[0] for entry in reversed(list(stack.values())) if entry[0]), "")
        else:
            path = ""
        path = path.removeprefix("L['self'].").removeprefix("L['self']")
        base = str(node.target).split(".")[1] if "." in str(node.target) else node.name
        return self._unique(f"{path}/{base}" if path else base)

    def _unique(self, wanted: str) -> str:
        name = wanted
        while name in self.names:
            # Counted on from the last one: code that is unrolled over a sequence asks for the same
            # name tens of thousands of times.
            count = self.counts.get(wanted, 0) + 1
            self.counts[wanted] = count
            name = f"{wanted}.{count}"
        self.names.add(name)
        return name
