"""Joins written as an empty tensor whose parts are filled one after the other."""

from __future__ import annotations

from autopar.ir import Operator, Ref

from .spelling import Spelling, beside, word


def join(operator: Operator, spelling: Spelling) -> Operator | None:
    """The join of the values that fill a whole tensor along one dim, if an operator is the last."""
    dim = operator.attributes.get("dim", 0)
    parts: list[Operator] = []
    last: Operator | None = operator
    while last is not None and word(last) == "slice_scatter":
        parts.insert(0, last)
        last = spelling.makers.get(last.inputs[0])
    if len(parts) < 2 or last is None or word(last) != "new_empty" or not isinstance(dim, int):
        return None
    end = 0
    values = []
    for part in parts:
        given = part.attributes
        copy = spelling.maker(part.inputs[1], "copy")
        values.append(part.inputs[1] if copy is None else copy.inputs[1])
        ends = [
            (spelling.shape(name), spelling.dtype(name)) for name in (values[-1], part.inputs[1])
        ]
        along = (given.get("dim", 0), given.get("start") or 0, given.get("step", 1))
        if along != (dim, end, 1) or ends[0] != ends[1]:
            return None
        end += ends[0][0][dim]
    if end != spelling.shape(operator.outputs[0])[dim]:
        return None
    return Operator(
        name=beside(operator, "cat"),
        kind="aten.cat.default",
        inputs=tuple(values),
        outputs=operator.outputs,
        attributes={"tensors": tuple(map(Ref, range(len(values)))), "dim": dim},
    )
