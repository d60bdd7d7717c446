"""Masks that are equal for all sequences of a batch are made once, where layers do more with them
than to hand them to an attention: they join them with masks of their own, fill scores by them, or
add them to scores.

A mask [batch, 1, queries, keys] of counted places is as large as the scores of a layer, all layers
read it, and so its layout ties them all. Of one sequence it is small, and whole on every device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.ir import Graph, Operator, Ref, Tensor, Value, needed_operators

from .bands import Band
from .known_values import Known, KnownValues
from .patterns import Plain, Window, known_values_of, pattern_of, window_mask

_READERS = frozenset(
    f"aten.{name}"
    for name in (
        "__and__.Tensor",
        "__or__.Tensor",
        "bitwise_and.Tensor",
        "bitwise_or.Tensor",
        "logical_and.default",
        "logical_or.default",
        "masked_fill.Scalar",
        "masked_fill.Tensor",
        "where.self",
        "add.Tensor",
    )
)
"""Operators that read a mask in whatever shape fits that of their other operands."""


def with_masks_of_one_sequence(graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
    """The graph with every known mask of a batch, where it is one, in place of [queries, keys].

    `constants`: what the exported program holds.
    """
    if not any(operator.kind in _READERS for operator in graph.operators):
        return graph
    with torch.no_grad(), torch.device("cpu"):
        writer = _Writer(graph, known_values_of(graph, constants))
        operators = [writer.written(operator) for operator in graph.operators]
    if not writer.made:
        return graph
    wanted = {*graph.outputs, *graph.updates.values(), *((graph.loss,) if graph.loss else ())}
    needed = needed_operators([*writer.made, *operators], wanted)
    return replace(graph, tensors=writer.tensors, operators=needed)


class _Writer:
    """Puts small masks in place of large ones; `made`: the operators that make them."""

    def __init__(self, graph: Graph, known: KnownValues) -> None:
        self.graph = graph
        self.known = known
        self.tensors: dict[str, Tensor] = dict(graph.tensors)
        self.made: list[Operator] = []
        # By the name of a large mask, the small one in its place; by window, the mask itself.
        self.instead: dict[str, str | None] = {}
        self.windows: dict[Window, str] = {}
        self.turned: dict[Window, str] = {}
        self.filled: dict[tuple[Window, str, float, float], str] = {}

    def written(self, operator: Operator) -> Operator:
        """The operator with small masks, where it works out no mask itself."""
        if operator.kind not in _READERS or self.known.holds(operator.outputs[0]):
            return operator
        inputs = tuple(self._small(operator, name) for name in operator.inputs)
        return operator if inputs == operator.inputs else replace(operator, inputs=inputs)

    def _small(self, operator: Operator, name: str) -> str:
        """The mask that an operator reads in place of one of its inputs."""
        mask = self.graph.tensors[name]
        if len(mask.shape) < 3 or not self.known.holds(name):
            return name
        # What an operator makes has the shape of all its operands, so another has to have it whole.
        others = (self.graph.tensors[one] for one in operator.inputs if one != name)
        if all(other.shape != self.graph.tensors[operator.outputs[0]].shape for other in others):
            return name
        if name not in self.instead:
            self.instead[name] = self._of_one_sequence(mask)
        return self.instead[name] or name

    def _of_one_sequence(self, mask: Tensor) -> str | None:
        """The name of a mask [queries, keys] that is equal to all of `mask`; None if none is."""
        queries, keys = mask.shape[-2:]
        value = self.known.value(mask.name)
        if value is None or mask.size == queries * keys:
            return None
        if mask.dtype == "bool":
            window = _window(pattern_of(value, queries, keys), queries)
            if window is not None:
                return self._mask(window)
            window = _window(pattern_of(_turned(value), queries, keys), queries)
            return None if window is None else self._turned_mask(window)
        if not isinstance(value, Band):
            return None
        shown = replace(value, inside=torch.tensor(True), outside=torch.tensor(False))
        window = _window(pattern_of(shown, queries, keys), queries)
        return None if window is None else self._filled(window, mask.dtype, value)

    def _mask(self, window: Window) -> str:
        if window not in self.windows:
            made = window_mask(window, self.tensors)
            self.made += made
            self.windows[window] = made[-1].outputs[0]
        return self.windows[window]

    def _turned_mask(self, window: Window) -> str:
        """The name of a mask that hides what a window shows."""
        if window not in self.turned:
            shown = self._mask(window)
            given = {"self": Ref(0)}
            self.turned[window] = self._made("logical_not.default", shown, "bool", (shown,), given)
        return self.turned[window]

    def _filled(self, window: Window, dtype: str, value: Band) -> str:
        """The name of numbers [queries, keys]: one number inside of a window, and one outside."""
        inside = float(value.inside)
        outside = float(value.outside)
        key = (window, dtype, inside, outside)
        if key not in self.filled:
            hidden = self._turned_mask(window)
            sizes = (window.size, window.size)
            given: dict[str, Value] = {"size": sizes, "fill_value": inside, "dtype": dtype}
            full = self._made("full.default", hidden, dtype, (), given)
            given = {"self": Ref(0), "mask": Ref(1), "value": outside}
            self.filled[key] = self._made(
                "masked_fill.Scalar", hidden, dtype, (full, hidden), given
            )
        return self.filled[key]

    def _made(
        self, kind: str, like: str, dtype: str, inputs: tuple[str, ...], given: Mapping[str, Value]
    ) -> str:
        """Add an operator beside the mask `like`, whose shape it has; give its result."""
        name = f"{like.rpartition('/')[0]}/{kind.partition('.')[0]}.{len(self.made)}"
        result = replace(self.tensors[like], name=f"{name}:0", dtype=dtype)
        self.tensors[result.name] = result
        self.made.append(
            Operator(
                name=name,
                kind=f"aten.{kind}",
                inputs=inputs,
                outputs=(result.name,),
                attributes=dict(given),
            )
        )
        return result.name


def _window(pattern: object, queries: int) -> Window | None:
    """The window of a pattern: a causal one reaches back to the first place."""
    if pattern is Plain.CAUSAL:
        return Window(queries, queries - 1, 0)
    return pattern if isinstance(pattern, Window) else None


def _turned(value: Known) -> Known:
    """The mask that hides what another shows."""
    if isinstance(value, Band):
        return replace(value, inside=~value.inside, outside=~value.outside)
    return ~value
