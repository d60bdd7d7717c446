"""Writes a GPT-2 language model as an ONNX file, without torch.

`python examples/gpt2_onnx.py gpt2.onnx --layers 12`.
"""

from __future__ import annotations

import argparse
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

Size = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a GPT-2; those of the small one by default. A name stays a symbolic size."""

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    vocabulary: int = 50257
    positions: int = 1024
    batch: Size = "batch"
    sequence: Size = "sequence"

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"hidden size {self.hidden} is not a multiple of {self.heads} heads")


@dataclass
class _Writer:
    """The nodes and initializers so far; `data` receives the weights where they are wanted."""

    data: Path
    weights: bool
    seed: int
    nodes: list[NodeProto] = field(default_factory=list)
    initializers: list[TensorProto] = field(default_factory=list)
    offset: int = 0

    def op(
        self, op_type: str, name: str, inputs: Sequence[str], *, outputs: int = 1, **attributes: Any
    ) -> str:
        """Adds a node called `name` and returns its first output."""
        made = [f"{name}_output_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, list(inputs), made, name=name, **attributes))
        return made[0]

    def constant(self, name: str, value: object, dtype: type[np.generic] = np.int64) -> str:
        """Adds a small initializer stored in the file itself."""
        self.initializers.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def parameter(self, name: str, *shape: int, mean: float = 0.0, deviation: float = 0.02) -> str:
        """Add a weight, with its data in the external file if weights are wanted."""
        length = 4 * math.prod(shape)
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape)
        self.initializers.append(tensor)
        if self.weights:
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (
                ("location", self.data.name),
                ("offset", self.offset),
                ("length", length),
            ):
                tensor.external_data.add(key=key, value=str(value))
            self.offset += length
            generator = np.random.default_rng((self.seed, zlib.crc32(name.encode())))
            values = mean + deviation * generator.standard_normal(shape, dtype=np.float32)
            with self.data.open("ab") as stream:
                values.astype("<f4").tofile(stream)
        return name


def _normalized(w: _Writer, name: str, x: str, hidden: int) -> str:
    prefix = name.strip("/").replace("/", ".")
    scale = w.parameter(f"{prefix}.weight", hidden, mean=1.0, deviation=0.0)
    bias = w.parameter(f"{prefix}.bias", hidden, deviation=0.0)
    return w.op(
        "LayerNormalization", f"{name}/LayerNormalization", [x, scale, bias], axis=-1, epsilon=1e-5
    )


def _projected(w: _Writer, name: str, x: str, inputs: int, outputs: int) -> str:
    prefix = name.strip("/").replace("/", ".")
    weight = w.parameter(f"{prefix}.weight", inputs, outputs)
    bias = w.parameter(f"{prefix}.bias", outputs, deviation=0.0)
    return w.op("Add", f"{name}/Add", [w.op("MatMul", f"{name}/MatMul", [x, weight]), bias])


def _gelu(w: _Writer, name: str, x: str) -> str:
    """0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), spelled by primitives as exporters do."""
    cube = w.op("Pow", f"{name}/Pow", [x, "three"])
    inner = w.op("Add", f"{name}/Add", [x, w.op("Mul", f"{name}/Mul", [cube, "gelu_cubic"])])
    tanh = w.op("Tanh", f"{name}/Tanh", [w.op("Mul", f"{name}/Mul_1", [inner, "gelu_scale"])])
    half = w.op("Mul", f"{name}/Mul_2", [x, "half"])
    return w.op("Mul", f"{name}/Mul_3", [half, w.op("Add", f"{name}/Add_1", [tanh, "one"])])


def _attention(w: _Writer, name: str, x: str, hidden: int, heads: int) -> str:
    joined = _projected(w, f"{name}/c_attn", x, hidden, 3 * hidden)
    w.op("Split", f"{name}/Split", [joined, "thirds"], outputs=3, axis=2)
    parts = []
    for i, part in enumerate(("query", "key", "value")):
        split = w.op(
            "Reshape", f"{name}/{part}/Reshape", [f"{name}/Split_output_{i}", "head_shape"]
        )
        perm = [0, 2, 3, 1] if part == "key" else [0, 2, 1, 3]
        parts.append(w.op("Transpose", f"{name}/{part}/Transpose", [split], perm=perm))
    query, key, value = parts
    scores = w.op(
        "Div", f"{name}/Div", [w.op("MatMul", f"{name}/MatMul", [query, key]), "head_scale"]
    )
    masked = w.op("Where", f"{name}/Where", ["causal_mask", scores, "lowest"])
    weighted = w.op(
        "MatMul", f"{name}/MatMul_1", [w.op("Softmax", f"{name}/Softmax", [masked], axis=-1), value]
    )
    merged = w.op("Transpose", f"{name}/Transpose", [weighted], perm=[0, 2, 1, 3])
    return _projected(
        w,
        f"{name}/c_proj",
        w.op("Reshape", f"{name}/Reshape", [merged, "hidden_shape"]),
        hidden,
        hidden,
    )


def _block(w: _Writer, name: str, x: str, hidden: int, heads: int) -> str:
    attended = _attention(
        w, f"{name}/attn", _normalized(w, f"{name}/ln_1", x, hidden), hidden, heads
    )
    x = w.op("Add", f"{name}/Add", [x, attended])
    inner = _projected(
        w, f"{name}/mlp/c_fc", _normalized(w, f"{name}/ln_2", x, hidden), hidden, 4 * hidden
    )
    outer = _projected(
        w, f"{name}/mlp/c_proj", _gelu(w, f"{name}/mlp/act", inner), 4 * hidden, hidden
    )
    return w.op("Add", f"{name}/Add_1", [x, outer])


def _constants(w: _Writer, hidden: int, heads: int) -> None:
    w.constant("thirds", [hidden] * 3)
    w.constant("head_shape", [0, 0, heads, hidden // heads])
    w.constant("hidden_shape", [0, 0, hidden])
    numbers = {
        "three": 3.0,
        "gelu_cubic": 0.044715,
        "gelu_scale": math.sqrt(2 / math.pi),
        "half": 0.5,
        "one": 1.0,
    }
    numbers |= {"head_scale": math.sqrt(hidden / heads), "lowest": float(np.finfo(np.float32).min)}
    for name, value in numbers.items():
        w.constant(name, value, np.float32)
    for name, index in (("zero_index", 0), ("one_index", 1)):
        w.constant(name, index)


def _causal_mask(w: _Writer, length: str) -> None:
    """The lower triangle of the sequence length, made from the input's shape."""
    w.constant("first_axis", [0])
    row = w.op("Unsqueeze", "/mask/Unsqueeze", [length, "first_axis"])
    square = w.op("Concat", "/mask/Concat", [row, row], axis=0)
    ones = w.op(
        "ConstantOfShape",
        "/mask/ConstantOfShape",
        [square],
        value=helper.make_tensor("value", TensorProto.INT64, [1], [1]),
    )
    triangle = w.op("Trilu", "/mask/Trilu", [ones], upper=0)
    w.nodes.append(
        helper.make_node(
            "Cast", [triangle], ["causal_mask"], name="/mask/Cast", to=TensorProto.BOOL
        )
    )


def write_gpt2(path: str | Path, *, weights: bool = False, seed: int = 0, **sizes: Any) -> Path:
    """Writes the model to `path` and, with `weights`, random weights to `path` + ".data".

    `sizes`: the fields of `Sizes`.
    """
    path = Path(path)
    shape = Sizes(**sizes)
    w = _Writer(path.with_name(path.name + ".data"), weights, seed)
    if weights:
        w.data.write_bytes(b"")
    _constants(w, shape.hidden, shape.heads)
    table = w.parameter("wte.weight", shape.vocabulary, shape.hidden)
    tokens = w.op("Gather", "/wte/Gather", [table, "input_ids"])
    length = w.op("Gather", "/Gather", [w.op("Shape", "/Shape", ["input_ids"]), "one_index"])
    order = w.op("Range", "/Range", ["zero_index", length, "one_index"])
    places = w.op(
        "Gather", "/wpe/Gather", [w.parameter("wpe.weight", shape.positions, shape.hidden), order]
    )
    x = w.op("Add", "/Add", [tokens, places])
    _causal_mask(w, length)
    for i in range(shape.layers):
        x = _block(w, f"/h.{i}", x, shape.hidden, shape.heads)
    x = _normalized(w, "/ln_f", x, shape.hidden)
    head = w.op("Transpose", "/lm_head/Transpose", [table], perm=[1, 0])
    w.nodes.append(helper.make_node("MatMul", [x, head], ["logits"], name="/lm_head/MatMul"))
    graph = helper.make_graph(
        w.nodes,
        "gpt2",
        [
            helper.make_tensor_value_info(
                "input_ids", TensorProto.INT64, [shape.batch, shape.sequence]
            )
        ],
        [
            helper.make_tensor_value_info(
                "logits", TensorProto.FLOAT, [shape.batch, shape.sequence, shape.vocabulary]
            )
        ],
        w.initializers,
    )
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
        producer_name="autopar examples",
    )
    onnx.save(model, path)
    return path


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path")
    for name, default in (
        ("layers", 12),
        ("hidden", 768),
        ("heads", 12),
        ("vocabulary", 50257),
        ("positions", 1024),
        ("seed", 0),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--weights", action="store_true", help="also write random weights beside the model"
    )
    print(write_gpt2(**vars(parser.parse_args())))


if __name__ == "__main__":
    main()
