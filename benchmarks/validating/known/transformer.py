"""The graph of a transformer from its shape alone.

It holds the operators that a framework's kernels run: one operator for a fused kernel, several
where a framework runs several.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costmodel.frameworks import Kernels
from autopar.ir import Graph

from .attention_part import attend
from .ends_part import embed, head
from .feed_forward_part import experts, feed_forward
from .graph_builder import GraphBuilder
from .shape import PATTERN, Shape
from .state_part import state_space

DEFAULT_KERNELS = Kernels()


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A graph of a shape.

    `kinds`: of its layers, in the order of their numbers.
    """

    shape: Shape
    graph: Graph
    kinds: tuple[str, ...]


@functools.lru_cache(maxsize=256)
def transformer(
    shape: Shape,
    *,
    batch: int,
    dtype: str = "bfloat16",
    kernels: Kernels = DEFAULT_KERNELS,
    kinds: Sequence[str] | None = None,
) -> Transformer:
    """Return the training graph of `batch` sequences.

    Its layers are of the given `kinds`, else all.
    """
    b = GraphBuilder(shape, batch, dtype, kernels)
    layer_kinds = tuple(shape.kinds() if kinds is None else kinds)
    x = embed(b, "embed", shape.sequence)
    memory = ""
    if "encoder" in layer_kinds:
        memory = embed(b, "encode", shape.encoder_sequence or shape.sequence)
    # An image has one label, a sequence one for each token.
    labels = b.given("labels", (batch if shape.patch else batch * shape.sequence,))
    for index, kind in enumerate(layer_kinds):
        if kind == "encoder":
            memory = _layer(b, f"layers.{index}", memory, kind, "")
        else:
            x = _layer(b, f"layers.{index}", x, kind, memory)
    # Without a pattern of its own, a further module has a layer like the model's last.
    further = tuple(PATTERN[letter] for letter in shape.mtp_pattern) or layer_kinds[-1:]
    extra = [_predicts_further(b, f"mtp.{index}", x, labels, further) for index in range(shape.mtp)]
    loss = head(b, "head", x, labels)
    for index, other in enumerate(extra):
        loss = b.op(
            f"mtp.{index}.add",
            "aten.add.Tensor",
            {"self": loss, "other": other},
            (),
            dtype=b.tensors[loss].dtype,
        )[0]
    graph = Graph(
        name="transformer",
        tensors=b.tensors,
        operators=tuple(b.operators),
        inputs=tuple(b.inputs),
        outputs=(loss,),
        loss=loss,
    )
    return Transformer(shape=shape, graph=graph, kinds=layer_kinds)


def _layer(b: GraphBuilder, name: str, x: str, kind: str, memory: str) -> str:
    """Add a layer: attention and a feed-forward part, each with a residual.

    A decoder attends to an encoder's results, too, if there are any.
    """
    causal = b.shape.causal and kind != "encoder"
    # Layers of a pattern are one mixer each, with one residual.
    if kind in PATTERN.values():
        return _residual(b, name, x, _mixer(b, name, b.normalised(f"{name}.norm1", x), kind), "1")
    h = attend(
        b,
        f"{name}.attention",
        b.normalised(f"{name}.norm1", x),
        windowed="windowed" in kind,
        causal=causal,
    )
    x = _residual(b, name, x, h, "1")
    if memory and kind != "encoder":
        h = attend(b, f"{name}.cross", b.normalised(f"{name}.norm3", x), memory=memory)
        x = _residual(b, name, x, h, "3")
    h = b.normalised(f"{name}.norm2", x)
    h = (
        experts(b, f"{name}.experts", h)
        if "experts" in kind
        else feed_forward(b, f"{name}.mlp", h, b.shape.ffn)
    )
    return _residual(b, name, x, h, "2")


def _mixer(b: GraphBuilder, name: str, x: str, kind: str) -> str:
    """The computation of a layer of a pattern, without its residual."""
    if kind == PATTERN["M"]:
        return state_space(b, f"{name}.state", x)
    if kind == PATTERN["*"]:
        return attend(b, f"{name}.attention", x, causal=b.shape.causal)
    return (
        experts(b, f"{name}.experts", x)
        if kind == PATTERN["E"]
        else feed_forward(b, f"{name}.mlp", x, b.shape.ffn)
    )


def _residual(b: GraphBuilder, name: str, x: str, h: str, number: str) -> str:
    return b.pointwise(
        f"{name}.add{number}", "aten.add.Tensor", x, other=b.dropout(f"{name}.dropout{number}", h)
    )


def _predicts_further(b: GraphBuilder, name: str, x: str, labels: str, kinds: Sequence[str]) -> str:
    """Add a module that predicts a further token.

    Two normalised rows are joined and projected; layers and a head follow.
    """
    embedded = b.op(
        f"{name}.lookup",
        "aten.embedding.default",
        {"weight": "embed.weight", "indices": "tokens"},
        b.size(x),
    )[0]
    both = b.join(
        f"{name}.join", (b.normalised(f"{name}.norm1", x), b.normalised(f"{name}.norm2", embedded))
    )
    x = b.linear(f"{name}.down", both, b.shape.hidden, bias=False)
    for index, kind in enumerate(kinds):
        x = _layer(b, f"{name}.layer{index or ''}", x, kind, "")
    return head(b, f"{name}.head", x, labels)
