"""Random calls of the operators that move, pick or create elements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import numpy_helper

from tests.frontends.onnx.lowering.onnx_cases import Case, Generator, axis_of, floats, ints, shape


def _reshape(rng: Generator) -> Case:
    x = floats(rng, (2, 6, 4))
    target = [[-1, 4], [0, 3, -1], [4, 3, 2, 2], [48], [0, 0, 2, 2]][int(rng.integers(5))]
    return Case(kind="Reshape", inputs=[x, np.array(target, np.int64)], attributes={}, stored=(1,))


def _transpose(rng: Generator) -> Case:
    x = floats(rng, shape(rng))
    return Case(
        kind="Transpose",
        inputs=[x],
        attributes={"perm": rng.permutation(x.ndim).tolist()} if rng.random() < 0.8 else {},
    )


def _gather(rng: Generator) -> Case:
    x = floats(rng, shape(rng))
    axis = axis_of(rng, x.ndim)
    return Case(
        kind="Gather",
        inputs=[x, ints(rng, -x.shape[axis], x.shape[axis], shape(rng, 0, 2))],
        attributes={"axis": axis},
    )


def _gather_elements(rng: Generator) -> Case:
    x = floats(rng, shape(rng))
    axis = axis_of(rng, x.ndim)
    return Case(
        kind="GatherElements",
        inputs=[x, ints(rng, -x.shape[axis], x.shape[axis], x.shape)],
        attributes={"axis": axis},
    )


def _places(rng: Generator, sizes: Sequence[int], count: int) -> np.ndarray:
    """Different index tuples."""
    flat = rng.permutation(int(np.prod(sizes)))[:count]
    return np.stack(np.unravel_index(flat, tuple(sizes)), axis=-1).astype(np.int64)


def _gather_nd(rng: Generator) -> Case:
    x = floats(rng, (3, 4, 2))
    depth = int(rng.integers(1, 4))
    return Case(kind="GatherND", inputs=[x, _places(rng, x.shape[:depth], 2)], attributes={})


def _scatter_nd(rng: Generator) -> Case:
    x = floats(rng, (3, 4, 2))
    depth = int(rng.integers(1, 4))
    where = _places(rng, x.shape[:depth], 2)
    reduction = ["none", "add", "mul", "max", "min"][int(rng.integers(5))]
    return Case(
        kind="ScatterND",
        inputs=[x, where, floats(rng, (2, *x.shape[depth:]))],
        attributes={"reduction": reduction},
    )


def _scatter_elements(rng: Generator) -> Case:
    x = floats(rng, (4, 3))
    axis = int(rng.integers(2))
    rows = [rng.permutation(x.shape[axis])[:2] for _ in range(x.shape[1 - axis])]
    where = np.stack(rows, axis=1 - axis).astype(np.int64)
    reduction = ["none", "add", "mul", "max", "min"][int(rng.integers(5))]
    return Case(
        kind="ScatterElements",
        inputs=[x, where, floats(rng, where.shape)],
        attributes={"axis": axis, "reduction": reduction},
    )


def _concat(rng: Generator) -> Case:
    full = shape(rng)
    axis = axis_of(rng, len(full))
    parts = [
        floats(
            rng,
            [int(rng.integers(0, 4)) if i == axis % len(full) else n for i, n in enumerate(full)],
        )
        for _ in range(3)
    ]
    return Case(kind="Concat", inputs=parts, attributes={"axis": axis})


def _split(rng: Generator) -> Case:
    full = (*shape(rng, 1, 2), 7)
    return Case(
        kind="Split",
        inputs=[floats(rng, full), np.array([2, 4, 1])],
        attributes={"axis": -1},
        stored=(1,),
        outputs=3,
    )


def _unsqueeze(rng: Generator) -> Case:
    x = floats(rng, shape(rng))
    axes = np.array([0, -1] if rng.random() < 0.5 else [int(rng.integers(0, x.ndim + 1))], np.int64)
    return Case(kind="Unsqueeze", inputs=[x, axes], attributes={}, stored=(1,))


def _squeeze(rng: Generator) -> Case:
    x = floats(rng, (1, 3, 1, 2))
    return Case(
        kind="Squeeze",
        inputs=[x, np.array([[0], [-2], [0, 2]][int(rng.integers(3))], np.int64)],
        attributes={},
        stored=(1,),
    )


def _slice(rng: Generator) -> Case:
    x = floats(rng, (5, 6, 4))
    axes = rng.permutation(3)[: int(rng.integers(1, 4))]
    starts = ints(rng, -8, 8, axes.shape)
    ends = ints(rng, -8, 8, axes.shape)
    steps = np.where(rng.random(axes.size) < 0.3, -1, rng.integers(1, 3, axes.size))
    return Case(
        kind="Slice", inputs=[x, starts, ends, axes - 3, steps], attributes={}, stored=(1, 2, 3, 4)
    )


def _expand(rng: Generator) -> Case:
    return Case(
        kind="Expand",
        inputs=[floats(rng, (3, 1)), np.array([2, 1, 4], np.int64)],
        attributes={},
        stored=(1,),
    )


def _tile(rng: Generator) -> Case:
    return Case(
        kind="Tile", inputs=[floats(rng, (2, 3)), ints(rng, 1, 4, (2,))], attributes={}, stored=(1,)
    )


def _pad(rng: Generator) -> Case:
    mode = ["constant", "reflect", "edge", "wrap"][int(rng.integers(4))]
    pads = ints(rng, 0, 3, (6,))
    return Case(
        kind="Pad",
        inputs=[floats(rng, (3, 4, 5)), pads, np.array(1.5, np.float32)],
        attributes={"mode": mode},
        stored=(1,),
    )


def _trilu(rng: Generator) -> Case:
    x = floats(rng, (2, 4, 5))
    return Case(
        kind="Trilu",
        inputs=[x, np.array(int(rng.integers(-4, 5)))],
        attributes={"upper": int(rng.integers(2))},
        stored=(1,),
    )


def _top_k(rng: Generator) -> Case:
    x = floats(rng, (3, 5))
    axis = axis_of(rng, 2)
    largest = {"axis": axis, "largest": int(rng.integers(2))}
    return Case(
        kind="TopK", inputs=[x, np.array([2], np.int64)], attributes=largest, stored=(1,), outputs=2
    )


def _cumulative(rng: Generator) -> Case:
    x = floats(rng, shape(rng))
    choice = {"exclusive": int(rng.integers(2)), "reverse": int(rng.integers(2))}
    return Case(
        kind="CumSum", inputs=[x, np.array(axis_of(rng, x.ndim))], attributes=choice, stored=(1,)
    )


def _constant_of_shape(rng: Generator) -> Case:
    value = numpy_helper.from_array(np.array([2.5], np.float32))
    return Case(
        kind="ConstantOfShape",
        inputs=[np.array(shape(rng), np.int64)],
        attributes={"value": value},
        stored=(0,),
    )


def _range(rng: Generator) -> Case:
    start = float(rng.integers(-5, 5))
    step = [0.5, 2.0, -1.5][int(rng.integers(3))]
    numbers = [np.array(number, np.float32) for number in (start, start + step * 6.3, step)]
    return Case(kind="Range", inputs=numbers, attributes={}, stored=(0, 1, 2))


MOVING: Mapping[str, Callable[[Generator], Case]] = {
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Gather": _gather,
    "GatherND": _gather_nd,
    "GatherElements": _gather_elements,
    "ScatterND": _scatter_nd,
    "ScatterElements": _scatter_elements,
    "Concat": _concat,
    "Split": _split,
    "Unsqueeze": _unsqueeze,
    "Squeeze": _squeeze,
    "Slice": _slice,
    "Expand": _expand,
    "Tile": _tile,
    "Pad": _pad,
    "Trilu": _trilu,
    "ConstantOfShape": _constant_of_shape,
    "Range": _range,
    "TopK": _top_k,
    "CumSum": _cumulative,
}
