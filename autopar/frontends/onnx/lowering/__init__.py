"""Lowers ONNX operators to aten's, the one vocabulary of graphs, without torch.

Each has a function that writes down what it does, in torch's words, on symbols. Of the operators
that a node becomes, the one that makes the first output has the node's name; the others have it as
their prefix.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from importlib import import_module
from typing import Any

from autopar.errors import ModelError, UnsupportedOperators
from autopar.frontends.onnx.builder import Record
from autopar.frontends.onnx.calls import Argument
from autopar.frontends.onnx.model import REMEDY
from autopar.frontends.onnx.values import Val
from autopar.ir import Role

from .symbols import Symbol
from .trace import Asked, Trace

_FAMILIES = [
    import_module(f"{__name__}.{family}")
    for family in (
        *("attention", "casts", "detection", "elementwise", "indexing", "moving", "normalization"),
        *("products", "quantization", "recurrent", "reductions", "resampling", "state", "windows"),
    )
]


def _table(name: str) -> dict[str, Callable[..., Symbol | tuple[Symbol, ...]]]:
    """The functions of all families by kind; other domains than the default one are written out."""
    rows = (row for family in _FAMILIES for row in getattr(family, name, {}).items())
    return {kind if "." in kind else f"onnx.{kind}": function for kind, function in rows}


_FUNCTIONS = _table("FUNCTIONS")
_ASKING = _table("ASKING")
LOWERED = frozenset((*_FUNCTIONS, *_ASKING))
"""The operators of ONNX that are known here."""


def lower(
    records: Sequence[Record], outputs: list[Val], unique: Callable[[str], str]
) -> list[Record]:
    """The records in aten's operators; `UnsupportedOperators` names all that have no lowering.

    `outputs`: the graph's, in whose place are what operators hand on to them, by their names.
    `unique`: a name that no other tensor has.
    """
    missing = Counter(record.kind for record in records if record.kind not in LOWERED)
    if missing:
        raise UnsupportedOperators(missing, known=LOWERED, remedy=REMEDY)
    lowered: list[Record] = []
    shared: dict[Hashable, Val] = {}
    same: dict[Val, Val] = {}
    needed = frozenset(outputs)
    for record in records:
        given = {name: _renamed(value, same) for name, value in record.arguments.items()}
        trace = Trace(record.name, shared)
        _lower(record, given, trace, same, needed)
        for val in (*trace.constants, *(val for made in trace.records for val in made.outputs)):
            if val not in record.outputs:
                val.name = unique(val.name)
        lowered += trace.records
    outputs[:] = [same.get(val, val) for val in outputs]
    return lowered


def _renamed(value: Argument, same: Mapping[Val, Val]) -> Argument:
    if isinstance(value, Val):
        return same.get(value, value)
    if isinstance(value, tuple) and value and isinstance(value[0], Val):
        return tuple(same.get(item, item) for item in value if isinstance(item, Val))
    return value


def _lower(
    record: Record,
    given: Mapping[str, Argument],
    trace: Trace,
    same: dict[Val, Val],
    needed: frozenset[Val],
) -> None:
    """Write down the operators of one node, whose results are the node's own outputs."""
    arguments = {name: _symbolic(value, trace) for name, value in given.items()}
    try:
        if record.kind in _ASKING:
            asked = Asked(trace=trace, outputs=record.outputs, version=record.version)
            made = _ASKING[record.kind](asked, **arguments)
        else:
            made = _FUNCTIONS[record.kind](**arguments)
    except ModelError as error:
        raise ModelError(f"node {record.name!r} ({record.kind}): {error}") from error
    results = made if isinstance(made, tuple) else (made,)
    bound: dict[Val, Val] = {}
    for val, result in zip(record.outputs, results, strict=False):
        result = result.to(Symbol(trace, val).dtype)
        if result.shape != val.shape:
            raise ModelError(f"{record.name!r} makes {result.shape}, the file says {val.shape}")
        source = bound.get(result.val, result.val)
        maker = _maker(trace, source)
        if maker is not None and source not in bound.values():
            maker.outputs[maker.outputs.index(source)] = val
            bound[source] = val
        elif val not in needed:
            same[val] = source
        elif source.role is Role.ACTIVATION and source not in (*needed, *same.values()):
            source.name = val.name
            same[val] = source
        else:
            maker = _maker(trace, Symbol(trace, source).map("alias").val)
            assert maker is not None
            maker.outputs = [val]
    _settle(record, trace, bound)


def _settle(record: Record, trace: Trace, bound: Mapping[Val, Val]) -> None:
    """Let all that reads a result read the node's output that it has become."""
    for made in trace.records:
        made.arguments = {name: _renamed(value, bound) for name, value in made.arguments.items()}
        if record.outputs[0] in made.outputs:
            made.name = record.name
    shared = trace.shared
    if not bound.keys().isdisjoint(shared):
        shared |= {key: bound[val] for key, val in shared.items() if val in bound}
        shared |= {val: val for val in bound.values()}


def _maker(trace: Trace, val: Val) -> Record | None:
    return next((record for record in trace.records if val in record.outputs), None)


def _symbolic(value: Argument, trace: Trace) -> Any:
    if isinstance(value, Val):
        return Symbol(trace, value)
    if isinstance(value, tuple) and value and all(isinstance(item, Val) for item in value):
        return tuple(Symbol(trace, item) for item in value if isinstance(item, Val))
    return value
