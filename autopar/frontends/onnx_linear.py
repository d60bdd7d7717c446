"""Linear layers: a product with the transpose of a stored matrix becomes `linear`, which reads the matrix as stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.frontends.onnx_build import Record
from autopar.frontends.onnx_values import Val, is_float_code
from autopar.ir import Role

LINEAR = "aten.linear.default"


def as_linear(records: Iterable[Record]) -> Iterator[Record]:
    """`MatMul(x, Transpose(W))` as `linear(x, W)`, so that W is gathered and its gradient summed as a parameter's."""
    turned: dict[int, Val] = {}
    for record in records:
        if record.kind == "onnx.Transpose":
            source = record.arguments["data"]
            assert isinstance(source, Val)
            stored = source.role is Role.PARAMETER and is_float_code(source.dtype)
            if stored and len(source.shape) == 2 and record.arguments.get("perm") in (None, (1, 0)):
                turned[id(record.outputs[0])] = source
        right = record.arguments.get("B") if record.kind == "onnx.MatMul" else None
        if id(right) in turned:
            arguments = {"input": record.arguments["A"], "weight": turned[id(right)]}
            record = Record(name=record.name, kind=LINEAR, arguments=arguments, outputs=record.outputs)
        yield record
