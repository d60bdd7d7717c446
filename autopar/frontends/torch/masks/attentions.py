"""A mask that no input reaches is a constant; one that is causal is said by `is_causal`.

`torch.export` has transformers build a mask [batch, 1, queries, keys] of counted places, which a
run without it leaves to the attention's kernel. The kernel then skips what is hidden, and no tensor
of queries times keys is made.

Windows (`i - before <= j <= i + after` for query i and key j) are an attribute of an operator of
ours if no key comes later. Others have a mask [queries, keys], made of two comparisons for all
sequences and layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from autopar.ir import Graph, Operator, Ref, Tensor, Value, needed_operators
from autopar.ir.recipes import ATTENTION, ATTENTIONS, WINDOWED

from .patterns import Blocks, Pattern, Plain, Window, known_values_of, pattern_of, window_mask


def without_known_masks(graph: Graph, constants: Mapping[str, torch.Tensor]) -> Graph:
    """The graph with every mask left out that is known to hide nothing, or what comes later.

    A known window is an attribute or has a mask without a batch, and known blocks are samples of
    their own. Others stay as they are. `constants`: what the exported program holds.
    """
    if not any(map(_mask_of, graph.operators)):
        return graph
    with torch.no_grad(), torch.device("cpu"):
        patterns = _patterns(graph, constants)
    tensors = dict(graph.tensors)
    masks: dict[Window, str] = {}
    first: list[Operator] = []
    operators = []
    for operator in graph.operators:
        pattern = patterns.get(operator.name)
        if isinstance(pattern, Window) and _has_windows(operator, pattern, tensors):
            operator = _windowed(operator, pattern)
        elif isinstance(pattern, Window):
            if pattern not in masks:
                made = window_mask(pattern, tensors)
                masks[pattern] = made[-1].outputs[0]
                first += made
            operator = replace(operator, inputs=(*operator.inputs[:-1], masks[pattern]))
        elif isinstance(pattern, Blocks) and operator.kind == ATTENTION:
            operators += _in_blocks(_unmasked(operator, Plain.WHOLE), pattern.blocks, tensors)
            continue
        elif isinstance(pattern, Plain):
            operator = _unmasked(operator, pattern)
        operators.append(operator)
    wanted = {*graph.outputs, *graph.updates.values(), *((graph.loss,) if graph.loss else ())}
    needed = needed_operators([*first, *operators], wanted)
    return replace(graph, tensors=tensors, operators=needed)


def _patterns(graph: Graph, constants: Mapping[str, torch.Tensor]) -> dict[str, Pattern | None]:
    """The patterns of the attentions' masks, by operator."""
    known = known_values_of(graph, constants)
    patterns: dict[str, Pattern | None] = {}
    by_mask: dict[tuple[object, int, int], Pattern | None] = {}
    for operator in graph.operators:
        name = _mask_of(operator)
        if name is None:
            continue
        queries, keys = (graph.tensors[one].shape[-2] for one in operator.inputs[:2])
        # Layers of one kind hold one constant, under names of their own.
        case = (id(constants[name]) if name in constants else name, queries, keys)
        if case not in by_mask:
            by_mask[case] = pattern_of(known.value(name), queries, keys)
        patterns[operator.name] = by_mask[case]
    return patterns


def _mask_of(operator: Operator) -> str | None:
    """The mask of an attention, where it is its last tensor."""
    if operator.kind not in ATTENTIONS or operator.attributes.get("is_causal"):
        return None
    last = len(operator.inputs) - 1
    return operator.inputs[last] if operator.attributes.get("attn_mask") == Ref(last) else None


def _unmasked(operator: Operator, pattern: Plain) -> Operator:
    attributes = {**operator.attributes, "attn_mask": None}
    if pattern is Plain.CAUSAL:
        attributes["is_causal"] = True
    return replace(operator, inputs=operator.inputs[:-1], attributes=attributes)


def _has_windows(operator: Operator, window: Window, tensors: Mapping[str, Tensor]) -> bool:
    """Whether the operator with windows computes an attention behind this one."""
    query, key, value = (tensors[name].shape for name in operator.inputs[:3])
    alike = len(query) == 4 and query[0] == key[0] and key[:2] == value[:2]
    plain = alike and query[1] % key[1] == 0 and not operator.attributes.get("dropout_p")
    return plain and not window.after


def _windowed(operator: Operator, window: Window) -> Operator:
    whole = _unmasked(operator, Plain.CAUSAL)
    ours = ("query", "key", "value", "sinks", "is_causal", "scale", "cap")
    attributes = {name: whole.attributes[name] for name in ours if name in whole.attributes}
    return replace(whole, kind=WINDOWED, attributes={**attributes, "window": window.before + 1})


def _in_blocks(attention: Operator, count: int, tensors: dict[str, Tensor]) -> list[Operator]:
    """The operators of an attention without a mask, for `count` blocks of each sample.

    Sums over the keys of [b, heads, n s, d] with n blocks of s are those of [b n, heads, s, d]. New
    tensors go into `tensors`.
    """
    operators: list[Operator] = []
    result = tensors[attention.outputs[0]]

    def add(kind: str, source: str, sizes: tuple[int, ...], **attributes: Value) -> str:
        name = f"{attention.name}.blocks.{len(operators)}"
        made = replace(tensors[source], name=f"{name}:0", shape=sizes, role=result.role)
        tensors[made.name] = replace(made, trainable=False)
        operators.append(
            Operator(
                name=name,
                kind=kind,
                inputs=(source,),
                outputs=(made.name,),
                attributes={"self": Ref(0), **attributes},
            )
        )
        return made.name

    def view(source: str, *shape: int) -> str:
        return add("aten.reshape.default", source, shape, shape=shape)

    def swap(source: str) -> str:
        """Exchange the two dims behind the first."""
        samples, one, other, *rest = tensors[source].shape
        shape = (samples, other, one, *rest)
        return add("aten.transpose.int", source, shape, dim0=1, dim1=2)

    def apart(source: str) -> str:
        samples, heads, places, width = tensors[source].shape
        cut = swap(view(source, samples, heads, count, places // count, width))
        return view(cut, samples * count, heads, places // count, width)

    inputs = tuple(apart(name) for name in attention.inputs)
    samples, heads, places, width = result.shape
    name = f"{attention.name}.blocks"
    small = replace(
        result, name=f"{name}:0", shape=(samples * count, heads, places // count, width)
    )
    tensors[small.name] = small
    operators.append(replace(attention, name=name, inputs=inputs, outputs=(small.name,)))
    cut = view(small.name, samples, count, heads, places // count, width)
    last = view(swap(cut), *result.shape)
    joined = replace(operators[-1], name=attention.name, outputs=attention.outputs)
    del tensors[last]
    return [*operators[:-1], joined]
