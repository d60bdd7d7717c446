"""Calls of ONNX operators that onnx's node tests lack: where a rule depends on an attribute, both
sides of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from autopar.frontends.onnx import import_onnx
from autopar.runtime.models.onnx_module import OnnxModule, to_torch
from autopar.runtime.proof import Sample
from tests.frontends.onnx.lowering.onnx_cases import Case
from tests.sharding.onnx_samples import Loaded, each


def _n(*shape: int) -> np.ndarray:
    """Floats of either sign, all different."""
    return np.random.default_rng(len(shape)).uniform(-1, 1, shape).astype(np.float32)


def _i(*values: object) -> np.ndarray:
    return np.array(values, np.int64)


def _case(
    kind: str,
    *inputs: np.ndarray | None,
    stored: tuple[int, ...] = (),
    outputs: int = 1,
    opset: int = 22,
    **attributes: Any,
) -> Case:
    return Case(
        kind=kind, inputs=inputs, attributes=attributes, stored=stored, outputs=outputs, opset=opset
    )


def cases() -> Iterator[Case]:
    """One call each."""
    yield _case("GlobalLpPool", _n(2, 3, 4, 5), p=3)
    for equation, shapes in (
        ("...ij->ij", ((2, 3, 4, 6),)),
        ("...ij,jk->ik", ((2, 3, 4, 6), (6, 2))),
        ("...i,...i->...", ((2, 3, 6), (1, 3, 6))),
        ("ii,i->i", ((6, 6), (6,))),
        ("...ij,...jk", ((2, 1, 3, 6), (1, 4, 6, 2))),
        ("i...->...", ((6, 2, 3),)),
        ("ij,kl->ijkl", ((2, 3), (3, 2))),
    ):
        yield _case("Einsum", *(_n(*shape) for shape in shapes), equation=equation)
    heads: dict[str, Any] = {"q_num_heads": 6, "kv_num_heads": 2}
    for settings in (
        {"left_window_size": 1},
        {"right_window_size": 0},
        {"left_window_size": 2, "right_window_size": 1, "is_causal": 1},
    ):
        yield _case(
            "Attention", _n(2, 6, 4, 3), _n(2, 6, 4, 3), _n(2, 6, 4, 2), opset=27, **settings
        )
    yield _case("Attention", _n(2, 6, 18), _n(2, 6, 6), _n(2, 6, 4), _n(6, 6), opset=23, **heads)
    yield _case(
        "Attention",
        _n(2, 6, 4, 3),
        _n(2, 2, 4, 3),
        _n(2, 2, 4, 3),
        None,
        _n(2, 2, 2, 3),
        _n(2, 2, 2, 3),
        opset=23,
        outputs=3,
    )
    yield _case("Pad", _n(4, 6), _i(0, -1, 0, 1), stored=(1,))
    yield _case("Pad", _n(4, 6), _i(1, 0, 1, 0), stored=(1,), mode="reflect")
    yield _case(
        "Resize",
        _n(2, 2, 6, 6),
        None,
        np.array([1, 1, 1.1, 1], np.float32),
        stored=(2,),
        mode="linear",
    )
    yield _case(
        "Resize",
        _n(2, 2, 6, 6),
        np.array([0, 0, 0.2, 0, 1, 1, 0.8, 1], np.float32),
        None,
        _i(2, 2, 6, 6),
        stored=(1, 3),
        mode="linear",
        coordinate_transformation_mode="tf_crop_and_resize",
    )
    yield _case("Tile", _n(4, 6), _i(3, 1), stored=(1,))
    yield _case("GatherND", _n(2, 4, 6), _i([[1], [3]], [[0], [2]]), batch_dims=1)
    yield _case("Gather", _n(4, 6), _i([0, -1], [5, 2]), axis=-1)
    yield _case("Gather", _n(2, 4, 6), _i(3, -4, 0), axis=1)
    yield _case("GatherElements", _n(4, 6), _i([0, -1, 5], [5, 2, 1]), axis=1)
    yield _case(
        "ScatterElements",
        _n(4, 6),
        _i([0, -1, 3], [5, 2, 1], [1, 2, 3], [4, 0, 5]),
        _n(4, 3),
        axis=1,
    )
    yield _case(
        "ScatterElements",
        _n(4, 6),
        _i([0, 0, 3], [5, 5, 1], [1, 2, 3], [4, 0, 5]),
        _n(4, 3),
        axis=1,
        reduction="add",
    )
    yield _case("ScatterND", _n(4, 6), _i([2], [0]), _n(2, 6), reduction="mul")
    yield _case(
        "QuantizeLinear",
        _n(4, 6) * 9,
        np.abs(_n(4, 2)) + 0.1,
        np.zeros((4, 2), np.int8),
        axis=1,
        block_size=3,
    )
    yield _case(
        "DequantizeLinear",
        np.arange(24, dtype=np.int8).reshape(4, 6),
        np.abs(_n(4, 3)) + 0.1,
        axis=1,
        block_size=2,
    )
    yield _case("MaxPool", _n(2, 4, 4, 4), kernel_shape=[2, 2], outputs=2)
    yield _case(
        "OneHot",
        _i([0, 2, -1, 1], [3, 3, 0, 1]),
        _i(4),
        np.array([0.25, 4], np.float32),
        stored=(1,),
        axis=1,
    )
    yield _case(
        "SoftmaxCrossEntropyLoss",
        _n(6, 4, 2),
        np.arange(12).reshape(6, 2) % 4,
        reduction="sum",
        outputs=2,
    )
    yield _case("SoftmaxCrossEntropyLoss", _n(6, 4), np.arange(6) % 4)
    yield _case("NegativeLogLikelihoodLoss", _n(6, 4), np.arange(6) % 4, ignore_index=1)
    yield _case("ConvTranspose", _n(2, 4, 3, 3), _n(4, 6, 2, 2), _n(12), group=2, strides=[2, 2])
    yield _case(
        "LSTM",
        _n(4, 6, 2),
        _n(1, 12, 2),
        _n(1, 12, 3),
        None,
        np.array([1, 4, 2, 3, 4, 1], np.int32),
        hidden_size=3,
        outputs=3,
    )
    yield _case(
        "GRU",
        _n(4, 6, 2),
        _n(2, 9, 2),
        _n(2, 9, 3),
        hidden_size=3,
        direction="bidirectional",
        outputs=2,
    )
    yield _case("GroupNormalization", _n(2, 6, 4), _n(6), _n(6), num_groups=3)
    yield _case(
        "BatchNormalization",
        _n(6, 4, 2),
        _n(4),
        _n(4),
        _n(4),
        np.abs(_n(4)),
        training_mode=1,
        outputs=3,
    )


def extra() -> Iterator[Sample]:
    """The calls as samples, operator by operator."""
    for case in cases():
        model = case.model()
        graph = import_onnx(model)
        values = {name: value.detach() for name, value in OnnxModule(graph).named_tensors().items()}
        feeds = case.feeds()
        values.update((name, to_torch(feeds[name])) for name in graph.inputs)
        yield from each(Loaded(graph=graph, values=values), f"{case.kind} {dict(case.attributes)}")
