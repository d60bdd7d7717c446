"""Carries a new batch through a file whose constants hold the old one.

Refuses where that would change the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from onnx import NodeProto

from autopar.errors import ModelError

from .values import Val


def scaled_reshape(
    old: tuple[int, ...], new: tuple[int, ...], target: tuple[int, ...]
) -> tuple[int, ...] | None:
    """The sizes that `target`, a reshape of `old`, takes when its source grows to `new`.

    None where that is ambiguous.

    Source and target fall into groups of equal products; a group's outermost dim takes the change.

    >>> scaled_reshape((8, 512, 1024), (16, 512, 1024), (8, 512, 16, 64))
    (16, 512, 16, 64)
    >>> scaled_reshape((8, 4, 64), (16, 4, 64), (32, 64))
    (64, 64)
    >>> scaled_reshape((4, 8, 64), (4, 16, 64), (32, 64)) is None
    True
    """
    result = list(target)
    i = j = 0
    while i < len(old) or j < len(target):
        first = i
        start = j
        left = old[i] if i < len(old) else 1
        right = target[j] if j < len(target) else 1
        i = i + 1
        j = j + 1
        while left != right:
            if left < right and i < len(old):
                left = left * old[i]
                i = i + 1
            elif j < len(target):
                right = right * target[j]
                j = j + 1
            else:
                return None
        changed = [k for k in range(first, min(i, len(old))) if old[k] != new[k]]
        if not changed:
            continue
        group = list(range(start, min(j, len(target))))
        whole = math.prod(new[first : min(i, len(old))])
        outermost = all(old[k] == 1 for k in range(first, changed[0])) and len(changed) == 1
        rest = math.prod(target[k] for k in group[1:])
        if not group or whole % rest or not outermost:
            return None
        result[group[0]] = whole // rest
    return tuple(result)


class Rebatch:
    """The shapes of a walk with the file's own batch.

    The walk with the new batch is checked against them.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], old: int, new: int) -> None:
        self.shapes = shapes
        self.old = old
        self.new = new

    def refuse(self, node: NodeProto, reason: str) -> ModelError:
        """The error for a place that cannot follow."""
        where = f"node {node.name or node.output[0]!r} ({node.op_type})"
        return ModelError(
            f"the batch {self.old} is written into the model's constants and cannot become "
            f"{self.new}: {where} {reason}; "
            "export the model with a symbolic batch dim"
        )

    def target(self, node: NodeProto, source: Val | None, written: np.ndarray) -> np.ndarray:
        """The shape argument of a Reshape or Expand under the new batch."""
        before = self.shapes.get(node.input[0])
        after = self.shapes.get(node.output[0])
        if source is None or before is None or after is None:
            return written
        if node.op_type == "Expand":
            return np.array(
                self._expanded(before, source.shape, after, tuple(written.tolist())), np.int64
            )
        if before == source.shape:
            return np.array(after, np.int64)
        shape = scaled_reshape(before, source.shape, after)
        if shape is None:
            raise self.refuse(
                node, f"reshapes {before} to {after}, where the batch lies inside another dim"
            )
        return np.array(shape, np.int64)

    def _expanded(
        self,
        before: tuple[int, ...],
        now: tuple[int, ...],
        after: tuple[int, ...],
        written: tuple[int, ...],
    ) -> tuple[int, ...]:
        result = list(after)
        for k in range(len(before)):
            position = len(after) - len(before) + k
            if before[k] != now[k]:
                result[position] = now[k] if after[position] == before[k] else after[position]
        if (
            after
            and after[0] == self.old > 1
            and (len(before) < len(after) or before[0] == 1)
            and len(written) == len(after)
        ):
            result[0] = self.new
        return tuple(result)

    def indices(self, node: NodeProto, source: Val, array: np.ndarray) -> np.ndarray:
        """Constant indices into a tensor with the batch.

        Indices that count through the batch are continued.
        """
        before = self.shapes.get(node.input[0])
        if before is None or before == source.shape:
            return array
        axis = next((item.i for item in node.attribute if item.name == "axis"), 0)
        if node.op_type == "Gather" and before[axis] == source.shape[axis]:
            return array
        if node.op_type != "GatherND" or any(
            item.name == "batch_dims" and item.i for item in node.attribute
        ):
            raise self.refuse(node, f"reads {before} at constant places")
        changed = [axis for axis in range(len(before)) if before[axis] != source.shape[axis]]
        depth = array.shape[-1]
        if not any(axis < depth for axis in changed):
            return array
        row = array[:1]
        count = before[0]
        steps = np.arange(count).reshape(-1, *([1] * (array.ndim - 2)))
        counts = changed == [0] and array.shape[0] == count and bool((array[..., 0] == steps).all())
        if not counts or not bool((array[..., 1:] == row[..., 1:]).all()):
            raise self.refuse(node, f"reads {before} at constant places")
        longer = np.repeat(row, source.shape[0], axis=0)
        longer[..., 0] = np.arange(source.shape[0]).reshape(-1, *([1] * (array.ndim - 2)))
        return longer

    def check(self, node: NodeProto, name: str, shape: tuple[int, ...], source: Val | None) -> None:
        """Refuse a tensor whose shape changed in more than the batch."""
        before = self.shapes.get(name)
        if before is None:
            return
        fits = len(before) == len(shape) and all(
            n == o or n * self.old == o * self.new for o, n in zip(before, shape, strict=True)
        )
        if not fits:
            raise self.refuse(node, f"makes {shape} where the file makes {before}")
        whole = self.shapes.get(node.input[0]) if node.input else None
        if node.op_type != "Slice" or whole is None or source is None:
            return
        if any(
            w != now and o == w and n != now
            for w, now, o, n in zip(whole, source.shape, before, shape, strict=True)
        ):
            raise self.refuse(node, f"cuts {source.shape} to {shape}")
