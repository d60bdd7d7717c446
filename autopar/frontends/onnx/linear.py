"""Reads a product with a transposed stored matrix as `linear`, which takes the matrix as stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.ir import Role
from autopar.ir.stored_products import LINEAR as LINEAR

from .builder import Record
from .values import Val, is_float_code


def as_linear(records: Iterable[Record]) -> Iterator[Record]:
    """Rewrite `MatMul(x, Transpose(W))` as `linear(x, W)`.

    So W is gathered, and its gradient reduced, as a parameter's.
    """
    turned: dict[Val, Val] = {}
    for record in records:
        if record.kind == "aten.permute.default":
            source = record.arguments["self"]
            assert isinstance(source, Val)
            stored = source.role is Role.PARAMETER and is_float_code(source.dtype)
            if stored and len(source.shape) == 2 and record.arguments["dims"] == (1, 0):
                turned[record.outputs[0]] = source
        right = record.arguments.get("other") if record.kind == "aten.matmul.default" else None
        if isinstance(right, Val) and right in turned:
            arguments = {"input": record.arguments["self"], "weight": turned[right]}
            record = Record(
                name=record.name, kind=LINEAR, arguments=arguments, outputs=record.outputs
            )
        yield record
