"""Output shapes of operators for which onnx infers incomplete shapes from known inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autopar.ir.graph import Value

from .values import Val

Typed = tuple[int, tuple[int, ...]]
Inputs = Sequence[Val | None]
Rule = Callable[[int, Inputs, Mapping[str, Value]], Typed | None]


def own_inference(
    op_type: str, index: int, inputs: Inputs, attributes: Mapping[str, Value]
) -> Typed | None:
    """Element type and shape of output `index`, or None where no rule tells it."""
    return _RULES[op_type](index, inputs, attributes) if op_type in _RULES else None


def _by_heads(val: Val, heads: Value) -> tuple[int, int, int, int]:
    if len(val.shape) == 4:
        batch, count, length, size = val.shape
        return batch, count, length, size
    count = heads if isinstance(heads, int) and heads else 1
    batch, length, width = val.shape
    return batch, count, length, width // count


def _attention(index: int, inputs: Inputs, attributes: Mapping[str, Value]) -> Typed | None:
    query, key, value = inputs[:3]
    past = inputs[4] if len(inputs) > 4 else None
    if query is None or key is None or value is None:
        return None
    batch, heads, length, _ = _by_heads(query, attributes.get("q_num_heads"))
    _, kv_heads, added, key_size = _by_heads(key, attributes.get("kv_num_heads"))
    value_size = _by_heads(value, attributes.get("kv_num_heads"))[3]
    total = added + (past.shape[2] if past is not None else 0)
    whole: tuple[int, ...]
    if len(query.shape) == 3:
        whole = (batch, length, heads * value_size)
    else:
        whole = (batch, heads, length, value_size)
    shapes = (
        whole,
        (batch, kv_heads, total, key_size),
        (batch, kv_heads, total, value_size),
        (batch, heads, length, total),
    )
    return query.dtype, shapes[index]


def _like_first(index: int, inputs: Inputs, attributes: Mapping[str, Value]) -> Typed | None:
    return (inputs[0].dtype, inputs[0].shape) if index == 0 and inputs[0] is not None else None


def _unpool(index: int, inputs: Inputs, attributes: Mapping[str, Value]) -> Typed | None:
    source = inputs[0]
    wanted = inputs[2].known() if len(inputs) > 2 and inputs[2] is not None else None
    if source is None or wanted is None:
        return None
    return (source.dtype, tuple(int(size) for size in wanted))


_RULES: Mapping[str, Rule] = {
    "Attention": _attention,
    "GroupNormalization": _like_first,
    "MeanVarianceNormalization": _like_first,
    "MaxUnpool": _unpool,
}
