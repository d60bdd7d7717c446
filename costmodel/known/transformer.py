"""The graph of a decoder-only transformer from its shape alone, with what the known schemes make of each operator.

It holds the operators that a framework's kernels run: one operator a fused kernel, several where a framework runs several.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from autopar.errors import UsageError, unknown
from autopar.ir import Graph, Operator, Ref, Role, Tensor, Value
from autopar.sharding.layout import R, S

from .shape import Shape
from .wanted import DEALT, EXPERT, EXPERT_INNER, EXPERT_SUM, HEADS, INNER, ROWS, SUM, WHOLE, WHOLE_SEQUENCE, Wanted

ATTENTIONS = ("unfused", "fused", "flash1", "flash2")
"""Attention: separate kernels for scale, mask and softmax; these three in one kernel; flash attention 1 and 2."""
NORMS = ("fused", "unfused")


@dataclass(frozen=True, slots=True, kw_only=True)
class Transformer:
    """A graph with the pins of its operators; the names of operators and parameters begin with their part."""

    shape: Shape
    graph: Graph
    wanted: Mapping[str, Wanted]


@functools.lru_cache(maxsize=256)
def transformer(
    shape: Shape, *, batch: int, dtype: str = "bfloat16", attention: str = "flash2", norm: str = "fused", products: str = "",
    layers: int | None = None,
) -> Transformer:  # fmt: skip
    """The training graph of `batch` sequences, with as many `layers` as given (default: all).

    `attention`: of `ATTENTIONS`. `norm`: "fused" is one kernel, "unfused" the chain of elementwise kernels in float32. `products`: the
    dtype to which the layers' linear operators cast their operands (empty: none).
    """
    if attention not in ATTENTIONS:
        raise UsageError(unknown("attention", attention, ATTENTIONS))
    if norm not in NORMS:
        raise UsageError(unknown("norm", norm, NORMS))
    builder = _Builder(shape, batch, dtype, attention, norm, products)
    return builder.build(shape.layers if layers is None else layers)


@dataclass(slots=True)
class _Builder:
    shape: Shape
    batch: int
    dtype: str
    attention: str
    norm: str
    products: str
    tensors: dict[str, Tensor] = field(default_factory=dict)
    operators: list[Operator] = field(default_factory=list)
    wanted: dict[str, Wanted] = field(default_factory=dict)
    inputs: list[str] = field(default_factory=list)

    def build(self, layers: int) -> Transformer:
        s = self.shape
        tokens = self.tensor("tokens", (self.batch, s.sequence), "int64", Role.INPUT)
        labels = self.tensor("labels", (self.batch * s.sequence,), "int64", Role.INPUT)
        x = self.embed(tokens)
        for index in range(layers):
            x = self.layer(f"layers.{index}", x, with_experts=s.experts > 0 and (index + 1) % s.expert_every == 0)
        loss = self.head(x, labels)
        graph = Graph(
            name="transformer", tensors=self.tensors, operators=tuple(self.operators), inputs=(tokens, labels, *self.inputs),
            outputs=(loss,), loss=loss,
        )  # fmt: skip
        return Transformer(shape=s, graph=graph, wanted=self.wanted)

    # --- pieces ---

    def tensor(self, name: str, shape: tuple[int, ...], dtype: str | None = None, role: Role = Role.ACTIVATION) -> str:
        self.tensors[name] = Tensor(name=name, shape=shape, dtype=dtype or self.dtype, role=role, trainable=role is Role.PARAMETER)
        return name

    def weight(self, name: str, *shape: int) -> str:
        return self.tensor(name, shape, role=Role.PARAMETER)

    def op(
        self, name: str, kind: str, inputs: Mapping[str, str], out: tuple[int, ...], wanted: Wanted, *, dtype: str | None = None,
        outputs: int = 1, **attributes: Value,
    ) -> tuple[str, ...]:  # fmt: skip
        """Add an operator whose outputs are all of shape `out`, with one dtype and pin."""
        return self.add(name, kind, inputs, out, wanted, attributes, dtype, outputs)

    def add(
        self, name: str, kind: str, inputs: Mapping[str, str], out: tuple[int, ...], wanted: Wanted, attributes: Mapping[str, Value],
        dtype: str | None = None, outputs: int = 1,
    ) -> tuple[str, ...]:  # fmt: skip
        names = tuple(self.tensor(f"{name}:{i}", out, dtype) for i in range(outputs))
        refs = {argument: Ref(index) for index, argument in enumerate(inputs)}
        self.operators.append(
            Operator(name=name, kind=kind, inputs=tuple(inputs.values()), outputs=names, attributes={**refs, **attributes})
        )
        self.wanted[name] = wanted
        return names

    def rows(self, width: int) -> tuple[int, ...]:
        return (self.batch, self.shape.sequence, width)

    def linear(self, name: str, x: str, width: int, wanted: Wanted, *, bias: bool | None = None) -> str:
        inner = self.tensors[x].shape[-1]
        inputs = {"input": x, "weight": self.weight(f"{name}.weight", width, inner)}
        if self.shape.bias if bias is None else bias:
            inputs["bias"] = self.weight(f"{name}.bias", width)
        cast = {"compute": self.products} if self.products and name.startswith("layers.") else {}
        return self.add(name, "aten.linear.default", inputs, (*self.tensors[x].shape[:-1], width), wanted, cast)[0]

    def pointwise(self, name: str, kind: str, x: str, wanted: Wanted, *, other: str | None = None, dtype: str | None = None) -> str:
        inputs = {"self": x} if other is None else {"self": x, "other": other}
        return self.op(name, kind, inputs, self.tensors[x].shape, wanted, dtype=dtype)[0]

    def view(self, name: str, kind: str, x: str, out: tuple[int, ...], wanted: Wanted, **attributes: Value) -> str:
        return self.add(name, kind, {"self": x}, out, wanted, attributes)[0]

    def dropout(self, name: str, x: str, wanted: Wanted) -> str:
        if not self.shape.dropout:
            return x
        return self.op(name, "aten.dropout.default", {"input": x}, self.tensors[x].shape, wanted, p=0.1, train=True)[0]

    # --- parts of the model ---

    def embed(self, tokens: str) -> str:
        s = self.shape
        inputs = {"weight": self.weight("embed.weight", s.vocab, s.hidden), "indices": tokens}
        x = self.op("embed.lookup", "aten.embedding.default", inputs, self.rows(s.hidden), SUM)[0]
        if s.position == "learned":
            table = self.weight("embed.position", s.sequence, s.hidden)
            x = self.op("embed.add", "aten.add.Tensor", {"self": x, "other": table}, self.rows(s.hidden), ROWS)[0]
        return self.dropout("embed.dropout", x, ROWS)

    def normalised(self, name: str, x: str) -> str:
        if self.norm == "unfused":
            return self.norm_in_pieces(name, x)
        inputs = {"input": x, "weight": self.weight(f"{name}.weight", self.shape.hidden)}
        if self.shape.norm == "layer_norm":
            inputs["bias"] = self.weight(f"{name}.bias", self.shape.hidden)
        kind = f"aten.{self.shape.norm}.default"
        return self.op(name, kind, inputs, self.tensors[x].shape, ROWS, normalized_shape=(self.shape.hidden,))[0]

    def norm_in_pieces(self, name: str, x: str) -> str:
        """RMS norm as a chain of kernels in float32: x * rsqrt(mean(x^2) + eps) * weight."""
        shape = self.tensors[x].shape
        one = (*shape[:-1], 1)
        wide = self.pointwise(f"{name}.float", "aten.to.dtype", x, ROWS, dtype="float32")
        square = self.op(f"{name}.square", "aten.pow.Tensor_Scalar", {"self": wide}, shape, ROWS, dtype="float32", exponent=2)[0]
        mean = self.op(f"{name}.mean", "aten.mean.dim", {"self": square}, one, ROWS, dtype="float32", dim=(-1,), keepdim=True)[0]
        scale = self.pointwise(f"{name}.rsqrt", "aten.rsqrt.default", mean, ROWS, dtype="float32")
        scaled = self.pointwise(f"{name}.scale", "aten.mul.Tensor", wide, ROWS, other=scale, dtype="float32")
        narrow = self.pointwise(f"{name}.narrow", "aten.to.dtype", scaled, ROWS, dtype=self.dtype)
        return self.pointwise(f"{name}.weigh", "aten.mul.Tensor", narrow, ROWS, other=self.weight(f"{name}.weight", shape[-1]))

    def layer(self, name: str, x: str, *, with_experts: bool) -> str:
        h = self.attend(f"{name}.attention", self.normalised(f"{name}.norm1", x))
        x = self.pointwise(f"{name}.add1", "aten.add.Tensor", x, ROWS, other=self.dropout(f"{name}.dropout1", h, ROWS))
        h = self.normalised(f"{name}.norm2", x)
        h = self.experts(f"{name}.experts", h) if with_experts else self.feed_forward(f"{name}.mlp", h)
        return self.pointwise(f"{name}.add2", "aten.add.Tensor", x, ROWS, other=self.dropout(f"{name}.dropout2", h, ROWS))

    def heads(self, name: str, x: str, count: int, parts: int) -> tuple[str, ...]:
        """Split a projection into `parts` tensors [batch, heads, sequence, head size]."""
        s = self.shape
        d = s.head_size
        inner = (self.batch, s.sequence, count, parts * d)
        x = self.view(f"{name}.view", "aten.view.default", x, inner, INNER, size=inner)
        cut = (*inner[:-1], d)
        pieces: tuple[str, ...] = (x,)
        if parts > 1:
            pieces = self.op(f"{name}.split", "aten.split.Tensor", {"self": x}, cut, INNER, outputs=parts, split_size=d, dim=-1)
        shape = (self.batch, count, s.sequence, d)
        return tuple(
            self.view(f"{name}.transpose{i}", "aten.transpose.int", piece, shape, HEADS, dim0=1, dim1=2) for i, piece in enumerate(pieces)
        )

    def attend(self, name: str, x: str) -> str:
        s = self.shape
        width = s.heads * s.head_size
        if s.kv_heads == s.heads:
            q, k, v = self.heads(name, self.linear(f"{name}.qkv", x, 3 * width, INNER), s.heads, 3)
        else:
            (q,) = self.heads(f"{name}.q", self.linear(f"{name}.query", x, width, INNER), s.heads, 1)
            k, v = self.heads(f"{name}.kv", self.linear(f"{name}.keyvalue", x, 2 * s.kv_heads * s.head_size, INNER), s.kv_heads, 2)
        if s.position.startswith("rotary"):
            q, k = (self.rotate(f"{name}.rotate{i}", t) for i, t in enumerate((q, k)))
        context = self.core(f"{name}.core", q, k, v)
        rows = self.view(
            f"{name}.back", "aten.transpose.int", context, (self.batch, s.sequence, s.heads, s.head_size), INNER, dim0=1, dim1=2
        )
        flat = self.rows(width)
        # The product's kernel wants rows that lie together: flash attention writes them so, batched products do not.
        kind = "aten.view.default" if self.attention.startswith("flash") else "aten.clone.default"
        if kind == "aten.clone.default":
            rows = self.pointwise(f"{name}.contiguous", kind, rows, INNER)
        flattened = self.view(f"{name}.flatten", "aten.view.default", rows, flat, INNER, size=flat)
        return self.linear(f"{name}.out", flattened, s.hidden, SUM)

    def rotate(self, name: str, x: str) -> str:
        """Rotary positions: one kernel, or x * cos + rotated(x) * sin as six."""
        if self.shape.position == "rotary":  # any kernel that reads and writes once
            return self.pointwise(name, "aten.neg.default", x, HEADS)
        halves = self.pointwise(f"{name}.neg", "aten.neg.default", x, HEADS)
        turned = self.pointwise(f"{name}.cat", "aten.clone.default", halves, HEADS)
        cos = self.op(f"{name}.cos", "aten.mul.Tensor", {"self": x}, self.tensors[x].shape, HEADS, other=1.0)[0]
        sin = self.op(f"{name}.sin", "aten.mul.Tensor", {"self": turned}, self.tensors[x].shape, HEADS, other=1.0)[0]
        return self.pointwise(f"{name}.sum", "aten.add.Tensor", cos, HEADS, other=sin)

    def core(self, name: str, q: str, k: str, v: str) -> str:
        """Attention proper, [batch, heads, sequence, head size] each."""
        s = self.shape
        shape = self.tensors[q].shape
        if self.attention.startswith("flash"):
            inputs = {"query": q, "key": k, "value": v}
            # Its kernels draw dropout from a counter: nothing more is read, written or kept.
            return self.op(
                name, "aten.scaled_dot_product_attention.default", inputs, shape, HEADS, attn_mask=None, is_causal=True, dropout_p=0.0,
                enable_gqa=s.kv_heads != s.heads, kernel=self.attention,
            )[0]  # fmt: skip
        grouped = (shape[0], s.kv_heads, shape[1] // s.kv_heads * shape[2], shape[3])
        if grouped != shape:  # the queries of a group lie behind one another and share its keys
            q = self.view(f"{name}.group", "aten.reshape.default", q, grouped, HEADS, shape=grouped)
        keys = (*self.tensors[k].shape[:2], shape[3], s.sequence)
        turned = self.view(f"{name}.keys", "aten.transpose.int", k, keys, replace(HEADS, context=R), dim0=-1, dim1=-2)
        w = self.op(f"{name}.scores", "aten.matmul.default", {"self": q, "other": turned}, (*grouped[:3], s.sequence), HEADS)[0]
        if s.position == "alibi":  # the bias is laid out whole before the product adds to it
            w = self.pointwise(f"{name}.bias", "aten.clone.default", w, HEADS)
        w = self.dropout(f"{name}.dropout", self.softmax(name, w), HEADS)
        w = self.op(f"{name}.context", "aten.matmul.default", {"self": w, "other": v}, grouped, HEADS)[0]
        return w if grouped == shape else self.view(f"{name}.ungroup", "aten.reshape.default", w, shape, HEADS, shape=shape)

    def softmax(self, name: str, w: str) -> str:
        """Scale, mask and softmax: one kernel, or a copy, a masked fill, a softmax in float32 and a cast."""
        shape = self.tensors[w].shape
        if self.attention == "fused":
            return self.op(f"{name}.softmax", "aten.softmax.int", {"self": w}, shape, HEADS, dim=-1)[0]
        w = self.pointwise(f"{name}.copy", "aten.clone.default", w, HEADS)
        w = self.op(f"{name}.mask", "aten.mul.Tensor", {"self": w}, shape, HEADS, other=1.0)[0]
        w = self.op(f"{name}.softmax", "aten.softmax.int", {"self": w}, shape, HEADS, dtype="float32", dim=-1)[0]
        return self.pointwise(f"{name}.narrow", "aten.to.dtype", w, HEADS, dtype=self.dtype)

    def feed_forward(self, name: str, x: str) -> str:
        s = self.shape
        if not s.gated:
            h = self.pointwise(f"{name}.gelu", "aten.gelu.default", self.linear(f"{name}.up", x, s.ffn, INNER), INNER)
        else:
            rows = self.rows(s.hidden)
            own = x if s.shared_input else self.view(f"{name}.own", "aten.view.default", x, rows, ROWS, size=rows)
            gate = self.pointwise(f"{name}.silu", "aten.silu.default", self.linear(f"{name}.gate", own, s.ffn, INNER), INNER)
            h = self.pointwise(f"{name}.mul", "aten.mul.Tensor", gate, INNER, other=self.linear(f"{name}.up", x, s.ffn, INNER))
        return self.linear(f"{name}.down", h, s.hidden, SUM)

    def experts(self, name: str, x: str) -> str:
        """Experts as GShard computes them (Lepikhin et al., arXiv:2006.16668): a one-hot product deals the rows of each sequence out to
        e experts of capacity c, each expert runs its rows, and another such product brings them back.
        """
        s = self.shape
        b, e = self.batch, s.experts
        c = max(round(s.capacity * s.top_k * s.sequence / e), 1)
        self.linear(f"{name}.router", x, e, ROWS, bias=False)
        chosen = self.tensor(f"{name}.chosen", (b, e * c, s.sequence), role=Role.INPUT)
        weights = self.tensor(f"{name}.weights", (b, s.sequence, e * c), role=Role.INPUT)
        self.inputs += [chosen, weights]
        dealt = self.op(f"{name}.deal", "aten.matmul.default", {"self": chosen, "other": x}, (b, e * c, s.hidden), WHOLE_SEQUENCE)[0]
        own = self.view(f"{name}.split", "aten.view.default", dealt, (b, e, c, s.hidden), WHOLE_SEQUENCE, size=(b, e, c, s.hidden))
        turned = self.view(f"{name}.turn", "aten.transpose.int", own, (e, b, c, s.hidden), DEALT, dim0=0, dim1=1)
        rows = self.view(f"{name}.join", "aten.reshape.default", turned, (e, b * c, s.hidden), EXPERT, shape=(e, b * c, s.hidden))
        up = self.weight(f"{name}.up.weight", e, s.hidden, s.ffn)
        h = self.op(f"{name}.up", "aten.bmm.default", {"self": rows, "mat2": up}, (e, b * c, s.ffn), EXPERT_INNER)[0]
        if s.gated:
            gate = self.weight(f"{name}.gate.weight", e, s.hidden, s.ffn)
            g = self.op(f"{name}.gate", "aten.bmm.default", {"self": rows, "mat2": gate}, (e, b * c, s.ffn), EXPERT_INNER)[0]
            g = self.pointwise(f"{name}.silu", "aten.silu.default", g, EXPERT_INNER)
            h = self.pointwise(f"{name}.mul", "aten.mul.Tensor", g, EXPERT_INNER, other=h)
        else:
            h = self.pointwise(f"{name}.act", "aten.gelu.default", h, EXPERT_INNER)
        down = self.weight(f"{name}.down.weight", e, s.ffn, s.hidden)
        h = self.op(f"{name}.down", "aten.bmm.default", {"self": h, "mat2": down}, (e, b * c, s.hidden), EXPERT_SUM)[0]
        h = self.view(f"{name}.part", "aten.view.default", h, (e, b, c, s.hidden), DEALT, size=(e, b, c, s.hidden))
        h = self.view(f"{name}.unturn", "aten.transpose.int", h, (b, e, c, s.hidden), WHOLE_SEQUENCE, dim0=0, dim1=1)
        h = self.view(f"{name}.unsplit", "aten.reshape.default", h, (b, e * c, s.hidden), WHOLE_SEQUENCE, shape=(b, e * c, s.hidden))
        return self.op(f"{name}.combine", "aten.matmul.default", {"self": weights, "other": h}, self.rows(s.hidden), ROWS)[0]

    def head(self, x: str, labels: str) -> str:
        s = self.shape
        h = self.normalised("head.norm", x)
        if s.tied:
            shape = self.rows(s.vocab)
            logits = self.op("head.logits", "aten.linear.default", {"input": h, "weight": "embed.weight"}, shape, INNER)[0]
        else:
            logits = self.linear("head.logits", h, s.vocab, INNER, bias=False)
        split = Wanted(data=S(0), context=S(0, self.batch), tensor=S(1), sequence=S(1))
        rows, columns = (WHOLE, replace(split, tensor=R, sequence=R)) if s.gathered_logits else (INNER, split)
        logits = self.pointwise("head.float", "aten.to.dtype", logits, rows, dtype="float32")
        flat = (self.batch * s.sequence, s.vocab)
        logits = self.op("head.view", "aten.view.default", {"self": logits}, flat, columns, dtype="float32", size=flat)[0]
        inputs = {"self": logits, "target": labels}
        return self.op("head.loss", "aten.cross_entropy_loss.default", inputs, (), columns, dtype="float32", reduction=2)[0]
