"""Fused products, activations and norms of onnxruntime's optimiser."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from onnx import TensorProto

from autopar.errors import unknown
from autopar.frontends.onnx.writer import Writer

_WITH_ALPHA = ("LeakyRelu", "HardSigmoid", "Elu")


def activated(w: Writer, x: str, kind: str, parameters: list[float]) -> str:
    """A value after an activation by its name, "" for none."""
    if not kind:
        return x
    if kind == "Clip":
        return str(w("Clip", x, *(w.constant(p, x) for p in parameters)))
    if kind not in (*_WITH_ALPHA, "Relu", "Tanh", "Sigmoid", "Softplus", "Gelu"):
        raise w.refuse(unknown("activation", kind, ("Relu", "Tanh", "Sigmoid", *_WITH_ALPHA)))
    own = parameters if kind in _WITH_ALPHA else []
    given: dict[str, Any] = dict(zip(("alpha", "beta"), own, strict=False))
    return str(w(kind, x, **given))


def fused_matmul(w: Writer) -> None:
    """alpha A' B', either transposed in its last dims, or in its batch dims."""
    a, b = w.inputs("A B")
    for side in "AB":
        name = a if side == "A" else b
        rank = len(w.shape(name))
        order = list(range(rank))
        if w.attribute(f"transBatch{side}", 0):
            order = [*order[1:-1], order[0], order[-1]]
        if w.attribute(f"trans{side}", 0) and rank > 1:
            order[-2], order[-1] = order[-1], order[-2]
        turned = name if order == sorted(order) else w("Transpose", name, perm=order)
        a, b = (turned, b) if side == "A" else (a, turned)
    alpha = w.attribute("alpha", 1.0)
    if alpha == 1.0:
        return w.last("MatMul", a, b)
    return w.last("Mul", w("MatMul", a, b), w.constant(alpha, a))


def fused_gemm(w: Writer) -> None:
    """A Gemm and an activation."""
    own = {k: v for k, v in w.given.items() if k in ("alpha", "beta", "transA", "transB")}
    y = w("Gemm", *[name for name in w.inputs("A B C") if name], **own)
    names = [n for n in ("activation_alpha", "activation_beta") if n in w.given]
    kind = w.attribute("activation", "")
    w.last("Identity", activated(w, y, kind, [w.attribute(n, 0.0) for n in names]))


def fused_conv(w: Writer) -> None:
    """A convolution, a sum and an activation."""
    x, weight, bias, addend = w.inputs("X W B Z")
    own = {k: v for k, v in w.given.items() if not k.startswith("activation")}
    y = w("Conv", x, weight, *([bias] if bias else []), **own)
    y = w("Add", y, addend) if addend else y
    parameters = list(w.attribute("activation_params", []))
    w.last("Identity", activated(w, y, w.attribute("activation", ""), parameters))


def gelu(kind: str) -> Callable[[Writer], None]:
    """A Gelu of a sum; `kind`: "none" for the error function, "tanh" for its approximation."""

    def write(w: Writer) -> None:
        x, bias = w.inputs("X bias")
        w.last("Gelu", w("Add", x, bias) if bias else x, approximate=kind)

    return write


def quick_gelu(w: Writer) -> None:
    """The product x sigmoid(alpha x)."""
    x = w.input(0)
    alpha = w.attribute("alpha", 1.702)
    w.last("Mul", x, w("Sigmoid", w("Mul", x, w.constant(alpha, x))))


def _normal(w: Writer, x: str, scale: str, bias: str, mean_square: bool, epsilon: float) -> str:
    if mean_square:
        return str(w("RMSNormalization", x, scale, epsilon=epsilon))
    given = [x, scale, *([bias] if bias else [])]
    return str(w("LayerNormalization", *given, epsilon=epsilon))


def skip_normalization(mean_square: bool) -> Callable[[Writer], None]:
    """A norm of a residual sum, which is given as well."""

    def write(w: Writer) -> None:
        x, skip, scale, *rest = w.inputs("input skip gamma beta bias")
        beta, bias = ("", rest[0]) if mean_square else (rest[0], rest[1])
        total = w("Add", x, skip)
        total = w("Add", total, bias) if bias else total
        for place in (1, 2):
            if w.wanted(place) and w.node.output[place] in w.importer.used:
                raise w.refuse("gives its statistics, which is not supported")
        epsilon = w.attribute("epsilon", 1e-12)
        w.last("Identity", _normal(w, total, scale, beta, mean_square, epsilon))
        w.last("Identity", total, place=3)

    return write


def simplified_normalization(w: Writer) -> None:
    """A norm by the mean square."""
    x, scale = w.inputs("X scale")
    w.last("RMSNormalization", x, scale, **{"epsilon": 1e-5, **w.given})


def embed_normalization(w: Writer) -> None:
    """The sum of word, position and segment embeddings, normalised."""
    ids, segments, words, positions, kinds, gamma, beta, mask, places = w.inputs(
        "input_ids segment_ids word position segment gamma beta mask position_ids"
    )
    if not places:
        places = w.constant([range(w.shape(ids)[1])])
    total = w("Add", w("Gather", words, ids), w("Gather", positions, places))
    if segments:
        total = w("Add", total, w("Gather", kinds, segments))
    w.last("LayerNormalization", total, gamma, beta, epsilon=w.attribute("epsilon", 1e-12))
    if w.wanted(1):
        if mask:
            counts = w("ReduceSum", mask, w.constant([1]), keepdims=0)
            w.last("Identity", counts, place=1)
        else:
            w.last("Identity", w.constant([0] * w.shape(ids)[0], TensorProto.INT32), place=1)
    w.last("Identity", total, place=2)


def mixture(w: Writer) -> None:
    """A layer of experts: the k best of a softmax of `router_probs`, of all experts' results.

    All experts are computed, and those that a row does not choose have the weight zero.
    """
    x, router, first, first_bias, second, second_bias, third, third_bias = w.inputs(
        "input router_probs fc1 fc1_bias fc2 fc2_bias fc3 fc3_bias"
    )
    width = w.shape(x)[-1]
    rows = w("Unsqueeze", w.reshape(x, -1, width), w.constant([0]))
    chances = w("Softmax", router, axis=-1)
    best, places = w("TopK", chances, w.constant([w.attribute("k", 1)]), axis=-1, outputs=2)
    if w.attribute("normalize_routing_weights", 0):
        best = w("Div", best, w("ReduceSum", best, w.constant([-1]), keepdims=1))
    weights = w("ScatterElements", w("Mul", chances, w.constant(0, x)), places, best, axis=-1)

    def product(values: str, matrices: str, bias: str) -> str:
        # Matrices are stored [experts, out, in], and in older files [experts, in, out].
        inner = w.shape(values)[-1]
        turned = w.shape(matrices)[1] != inner or w.shape(matrices)[2] == inner
        made = w("MatMul", values, w("Transpose", matrices, perm=[0, 2, 1]) if turned else matrices)
        return str(w("Add", made, w("Unsqueeze", bias, w.constant([1])))) if bias else str(made)

    kind = {"relu": "Relu", "gelu": "Gelu", "silu": "Swish", "identity": "Identity"}
    chosen = w.attribute("activation_type", "relu")
    if chosen not in kind:
        raise w.refuse(unknown("activation_type", chosen, kind))
    hidden = product(rows, first, first_bias)
    if chosen == "silu":
        gate = w("Mul", hidden, w("Sigmoid", hidden))
    else:
        gate = w(kind[chosen], hidden, approximate="tanh" if chosen == "gelu" else None)
    if third:
        gate = w("Mul", gate, product(rows, third, third_bias))
    made = product(gate, second, second_bias)
    shares = w("Unsqueeze", w("Transpose", weights, perm=[1, 0]), w.constant([2]))
    total = w("ReduceSum", w("Mul", made, shares), w.constant([0]), keepdims=0)
    w.last("Reshape", total, w.constant(w.shape(x)))


FUSED: Mapping[str, Callable[[Writer], None]] = {
    "FusedMatMul": fused_matmul,
    "FusedGemm": fused_gemm,
    "FusedConv": fused_conv,
    "BiasGelu": gelu("none"),
    "Gelu": gelu("none"),
    "FastGelu": gelu("tanh"),
    "QuickGelu": quick_gelu,
    "SkipLayerNormalization": skip_normalization(False),
    "SkipSimplifiedLayerNormalization": skip_normalization(True),
    "SimplifiedLayerNormalization": simplified_normalization,
    "EmbedLayerNormalization": embed_normalization,
    "MoE": mixture,
}
