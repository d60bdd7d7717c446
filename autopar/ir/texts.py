"""Graphs as texts (JSON), and back: any other text is refused."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from .graph import Graph, Operator, Ref, Role, Tensor, Value

T = TypeVar("T")
_REF = "input"
"""The key of an object that stands for a `Ref`."""
_NUMBERS = re.compile("[<|]([iu][1248]|f[248]|c(8|16)|b1)")
"""The types of arrays that texts hold, as numpy writes them."""


def text_of(graph: Graph) -> str:
    """A graph as a text; `ValueError` if it holds more than texts can."""
    if narrow := [tensor.name for tensor in graph.tensors.values() if tensor.narrow]:
        raise ValueError(f"the narrow copy of {narrow[0]!r} has no text")
    tensors = [[t.name, t.shape, t.dtype, t.role, t.trainable] for t in graph.tensors.values()]
    operators = [
        [o.name, o.kind, o.inputs, o.outputs, {n: _told(v) for n, v in o.attributes.items()}]
        for o in graph.operators
    ]
    return json.dumps(
        {
            "name": graph.name,
            "tensors": tensors,
            "operators": operators,
            "inputs": graph.inputs,
            "outputs": graph.outputs,
            "loss": graph.loss,
            "replicated": sorted(graph.replicated),
            "updates": dict(graph.updates),
            "constants": {name: _array_told(array) for name, array in graph.constants.items()},
        },
        separators=(",", ":"),
    )


def graph_of(text: str) -> Graph:
    """The graph that `text_of` wrote; `ValueError` for every other text."""
    try:
        data = _of(dict, json.loads(text))
        tensors = [_tensor(*_of(list, row)) for row in _of(list, data["tensors"])]
        return Graph(
            name=_of(str, data["name"]),
            tensors={tensor.name: tensor for tensor in tensors},
            operators=tuple(_operator(*_of(list, row)) for row in _of(list, data["operators"])),
            inputs=_names(data["inputs"]),
            outputs=_names(data["outputs"]),
            loss=None if data["loss"] is None else _of(str, data["loss"]),
            replicated=frozenset(_names(data["replicated"])),
            updates={old: _of(str, new) for old, new in _of(dict, data["updates"]).items()},
            constants={
                name: _array(*_of(list, row)) for name, row in _of(dict, data["constants"]).items()
            },
        )
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no graph: {error!r}") from error


def _told(value: Value) -> Any:
    if isinstance(value, Ref):
        return {_REF: value.index}
    if isinstance(value, tuple):
        return [_told(part) for part in value]
    if type(value) not in (bool, int, float, str, type(None)):
        raise ValueError(f"{value!r} is no value of an attribute")
    return value


def _value(told: Any, inputs: int) -> Value:
    if isinstance(told, dict):
        index = _of(int, told[_REF])
        if not 0 <= index < inputs:
            raise ValueError(f"an attribute names input {index} of {inputs}")
        return Ref(index)
    if isinstance(told, list):
        return tuple(_value(part, inputs) for part in told)
    assert told is None or isinstance(told, (bool, int, float, str)), "values of JSON"
    return told


def _array_told(array: np.ndarray) -> list[Any]:
    if not _NUMBERS.fullmatch(array.dtype.str):
        raise ValueError(f"an array of {array.dtype} has no text")
    return [array.dtype.str, array.shape, base64.b64encode(array.tobytes()).decode()]


def _array(dtype: Any, shape: Any, elements: Any) -> np.ndarray:
    if not _NUMBERS.fullmatch(_of(str, dtype)):
        raise ValueError(f"{dtype!r:.100} is no type of numbers")
    flat = np.frombuffer(base64.b64decode(_of(str, elements), validate=True), np.dtype(dtype))
    return flat.reshape(_all(_number, shape)).copy()


def _tensor(name: Any, shape: Any, dtype: Any, role: Any, trainable: Any) -> Tensor:
    return Tensor(
        name=_of(str, name),
        shape=_all(_number, shape),
        dtype=_of(str, dtype),
        role=Role(role),
        trainable=_of(bool, trainable),
    )


def _operator(name: Any, kind: Any, inputs: Any, outputs: Any, attributes: Any) -> Operator:
    given = _names(inputs)
    return Operator(
        name=_of(str, name),
        kind=_of(str, kind),
        inputs=given,
        outputs=_names(outputs),
        attributes={n: _value(v, len(given)) for n, v in _of(dict, attributes).items()},
    )


def _names(told: Any) -> tuple[str, ...]:
    return _all(_name, told)


def _name(told: Any) -> str:
    return _of(str, told)


def _number(told: Any) -> int:
    return _of(int, told)


def _all(each: Callable[[Any], T], told: Any) -> tuple[T, ...]:
    return tuple(map(each, _of(list, told)))


def _of(kind: type[T], told: Any) -> T:
    if type(told) is not kind:
        raise ValueError(f"{told!r:.100} is no {kind.__name__}")
    return told
