"""From global to local: an operator's sizes and counts, and the operators that need more than their shard to be right."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import PlanError
from autopar.ir import Operator, Ref, Tensor, Value
from autopar.sharding.layout import Layout, local_shape
from autopar.sharding.program import Decision
from autopar.sharding.rules.experts import EXPERTS

from .collectives import AxisGroup, Cut, cuts_of
from .communicating import COMMUNICATING
from .communicating.rows import shard_experts
from .experts import shard_layer
from .functions import Function, function_of
from .onnx_local import LOCAL_FUNCTIONS, LOCAL_SPECIALS
from .places import PLACED_FUNCTIONS
from .special import LIKE, SPECIAL_FUNCTIONS, padding_row


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCall:
    """An operator with its tensors, its decision and the place of this rank, as a rewriting sees it."""

    operator: Operator
    decision: Decision
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    mesh: tuple[int, ...]
    coordinate: tuple[int, ...]
    groups: tuple[AxisGroup, ...] = ()

    def local_input(self, index: int) -> tuple[int, ...]:
        """Local shape of an input."""
        return local_shape(self.decision.inputs[index], self.inputs[index].shape, self.mesh)

    def local_output(self, index: int = 0) -> tuple[int, ...]:
        """Local shape of an output."""
        return local_shape(self.decision.outputs[index], self.outputs[index].shape, self.mesh)

    def split(self, index: int, dim: int) -> int:
        """Into how many shards dim `dim` of input `index` is split."""
        return self.inputs[index].shape[dim] // max(self.local_input(index)[dim], 1)

    def cuts(self, layout: Layout) -> tuple[Cut, ...]:
        """The slices that lead from a whole tensor to this rank's shard."""
        return cuts_of(layout, self.mesh, self.coordinate)

    def degree(self, *, reduction: str) -> int:
        """Product of the axis sizes on which factors of this reduction are split."""
        rule = self.decision.rule
        if rule is None:
            return 1
        options = enumerate(self.decision.options)
        return math.prod(self.mesh[a] for a, o in options if o.factor >= 0 and rule.factors[o.factor].reduction == reduction)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOperator:
    """What a rank runs: a function, its attributes in local sizes, and what its result is multiplied by."""

    function: Function
    attributes: Mapping[str, Value]
    scale: float = 1.0


Rewrite = Callable[[LocalCall], Mapping[str, Value]]
Special = Callable[[LocalCall], Mapping[str, Value] | None]


def localise(call: LocalCall) -> LocalOperator:
    """The local form of an operator; kinds without an entry in the tables run as they are."""
    kind = call.operator.kind
    attributes = dict(call.operator.attributes)
    if kind in REWRITES:
        attributes.update(REWRITES[kind](call))
    function = function_of(kind)
    talks = [(axis, o.communication) for axis, o in enumerate(call.decision.options) if o.communication and call.mesh[axis] > 1]
    for axis, word in talks:
        function, more = COMMUNICATING[word](call, call.groups[axis])
        attributes.update(more)
    if not talks and kind in SPECIALS and (changes := SPECIALS[kind](call)) is not None:
        function = LOCAL_FUNCTIONS.get(kind) or PLACED_FUNCTIONS.get(kind) or SPECIAL_FUNCTIONS[kind]
        attributes.update(changes)
    return LocalOperator(function=function, attributes=attributes, scale=1.0 / call.degree(reduction="mean"))


def _shape_as(name: str) -> Rewrite:
    """The attribute `name` is the shape of the output."""
    return lambda call: {name: call.local_output()}


def _sizes(call: LocalCall) -> Mapping[str, Value]:
    """`unflatten`: the sizes of the dims that take the place of one."""
    dim, sizes = call.operator.attributes["dim"], call.operator.attributes["sizes"]
    assert isinstance(dim, int) and isinstance(sizes, tuple)
    first = dim % len(call.inputs[0].shape)
    return {"sizes": call.local_output()[first : first + len(sizes)]}


def _split_dim(call: LocalCall) -> int:
    dim = call.operator.attributes.get("dim", call.operator.attributes.get("axis", 0))
    assert isinstance(dim, int)
    return dim % len(call.inputs[0].shape)


def _split_size(call: LocalCall) -> Mapping[str, Value]:
    return {"split_size": call.local_output()[_split_dim(call)]}


def _split_sizes(name: str) -> Rewrite:
    def rewrite(call: LocalCall) -> Mapping[str, Value]:
        if name not in call.operator.attributes:
            return {}
        return {name: tuple(call.local_output(i)[_split_dim(call)] for i in range(len(call.outputs)))}

    return rewrite


def _slice(call: LocalCall) -> Mapping[str, Value]:
    """A slice of a split dim takes all of it."""
    dim = _split_dim(call)
    return {"start": 0, "end": call.local_output()[dim]} if call.split(0, dim) > 1 else {}


def _narrow(call: LocalCall) -> Mapping[str, Value]:
    dim = _split_dim(call)
    return {"start": 0, "length": call.local_output()[dim]} if call.split(0, dim) > 1 else {}


def _repeated(call: LocalCall) -> Mapping[str, Value]:
    """The size of the repeated dim, where it is given beside the count."""
    given = isinstance(call.operator.attributes.get("output_size"), int)
    return {"output_size": call.local_output()[_split_dim(call)]} if given else {}



def _resampled(call: LocalCall) -> Mapping[str, Value]:
    """The size of the space, where it is given."""
    return {"output_size": call.local_output()[2:]} if call.operator.attributes.get("output_size") is not None else {}


def _flat_group_norm(call: LocalCall) -> Mapping[str, Value]:
    """`native_group_norm` is told all of its sizes."""
    images, channels, *_ = call.local_input(0)
    return {"N": images, "C": channels, "group": call.local_output(1)[1]}


def _onnx_slice(call: LocalCall) -> Mapping[str, Value]:
    """As `_slice`, for several axes at once."""
    starts, ends, axes = (call.operator.attributes.get(name) for name in ("starts", "ends", "axes"))
    if not isinstance(starts, tuple) or not isinstance(ends, tuple):
        return {}
    dims = axes if isinstance(axes, tuple) else tuple(range(len(starts)))
    rank = len(call.inputs[0].shape)
    low, high = list(starts), list(ends)
    for i, dim in enumerate(dims):
        assert isinstance(dim, int)
        if call.split(0, dim % rank) > 1:
            low[i], high[i] = 0, call.local_output()[dim % rank]
    return {"starts": tuple(low), "ends": tuple(high)}


def _count(name: str, index: int, dim: int) -> Rewrite:
    """A count (groups, heads) along dim `dim` of input `index` shrinks with the split of that dim."""

    def rewrite(call: LocalCall) -> Mapping[str, Value]:
        value = call.operator.attributes.get(name)
        if not isinstance(value, int) or value <= 1 or index >= len(call.inputs):
            return {}
        degree = call.split(index, dim % len(call.inputs[index].shape))
        if value % degree:
            raise PlanError(f"operator {call.operator.name!r}: {name} = {value} cannot be split {degree} times")
        return {name: value // degree}

    return rewrite


def _all(*rewrites: Rewrite) -> Rewrite:
    return lambda call: {name: value for rewrite in rewrites for name, value in rewrite(call).items()}


def _three_dims(rewrite: Rewrite) -> Rewrite:
    """Head counts are given only where heads and width share the last of three dims."""
    return lambda call: rewrite(call) if len(call.inputs[0].shape) == 3 else {}


def _grid(call: LocalCall) -> Mapping[str, Value]:
    """`AffineGrid`: the size of the images, of which only the number is split."""
    size = call.operator.attributes["size"]
    assert isinstance(size, tuple)
    return {"size": (call.local_output()[0], *size[1:])}


def _cropped(call: LocalCall) -> Mapping[str, Value]:
    """`CenterCropPad`: the sizes of the dims named by `axes`, or of all."""
    shape, axes = call.local_output(), call.operator.attributes.get("axes")
    return {"shape": tuple(shape[axis] for axis in axes if isinstance(axis, int)) if isinstance(axes, tuple) else shape}


def _blocks(call: LocalCall) -> Mapping[str, Value]:
    """An adaptive pool: the output sizes of the spatial dims."""
    space = next(d for d in (1, 2, 3) if f"{d}d" in call.operator.kind)
    return {"output_size": call.local_output()[-space:]}


def _table(rows: Sequence[tuple[str, Rewrite]]) -> dict[str, Rewrite]:
    return {kind: rewrite for kinds, rewrite in rows for kind in kinds.split()}


REWRITES: Mapping[str, Rewrite] = _table([
    ("aten.view.default aten._unsafe_view.default aten.expand.default aten.broadcast_to.default", _shape_as("size")),
    ("aten.reshape.default onnx.Reshape onnx.Expand", _shape_as("shape")),
    ("aten.zeros.default aten.ones.default aten.full.default", _shape_as("size")),
    ("aten.new_zeros.default aten.new_ones.default aten.new_full.default aten.new_empty.default", _shape_as("size")),
    ("onnx.Resize", _shape_as("sizes")),
    ("aten.adaptive_avg_pool1d.default aten.adaptive_avg_pool2d.default aten.adaptive_avg_pool3d.default", _blocks),
    ("aten.unflatten.int", _sizes),
    ("aten.split.Tensor aten.unsafe_split.Tensor", _split_size),
    ("aten.split_with_sizes.default aten.unsafe_split_with_sizes.default", _split_sizes("split_sizes")),
    ("aten.repeat_interleave.self_int", _repeated),
    ("aten.affine_grid_generator.default", _grid),
    (" ".join(f"aten.{name}{d}d.{form}" for name in ("upsample_nearest", "_upsample_nearest_exact") for d in (1, 2, 3)
              for form in ("vec", "default")), _resampled),
    ("aten.native_group_norm.default", _flat_group_norm),
    ("aten.split.sizes", _split_sizes("split_size")),
    ("onnx.Split", _split_sizes("split")),
    ("aten.slice.Tensor", _slice),
    ("aten.narrow.default", _narrow),
    ("onnx.Slice", _onnx_slice),
    ("aten.group_norm.default onnx.GroupNormalization", _count("num_groups", 0, 1)),
    ("aten.conv1d.default aten.conv2d.default aten.conv3d.default aten.conv1d.padding aten.conv2d.padding", _count("groups", 1, 0)),
    ("aten.conv_transpose1d.default aten.conv_transpose2d.input aten.conv_transpose3d.input", _count("groups", 1, 0)),
    ("aten.convolution.default aten._convolution.default", _count("groups", 1, 0)),
    ("onnx.Conv onnx.ConvTranspose", _count("group", 1, 0)),
    ("onnx.ConvInteger", _count("group", 1, 0)),
    ("onnx.QLinearConv", _count("group", 3, 0)),
    ("onnx.AffineGrid", _grid),
    ("onnx.CenterCropPad", _cropped),
    ("onnx.RotaryEmbedding", _three_dims(_count("num_heads", 0, -1))),
    ("onnx.LinearAttention", _all(_count("q_num_heads", 0, -1), _count("kv_num_heads", 1, -1))),
    ("onnx.Attention", _three_dims(_all(_count("q_num_heads", 0, -1), _count("kv_num_heads", 1, -1)))),
])  # fmt: skip


def _masked_rows(table: str, indices: str, padding: str | None) -> Special:
    """A look-up in a table whose rows are split: rows of other shards give zeros."""

    def change(call: LocalCall) -> Mapping[str, Value] | None:
        attributes = call.operator.attributes
        weight = attributes[table]
        assert isinstance(weight, Ref) and isinstance(attributes[indices], Ref)
        cuts = tuple(cut for cut in call.cuts(call.decision.inputs[weight.index]) if cut.dim == 0)
        if not cuts:
            return None
        rows = call.inputs[weight.index].shape[0]
        changes: dict[str, Value] = {"rows": rows, "cuts": tuple(tuple(cut) for cut in cuts)}
        row = attributes.get(padding, -1) if padding else -1
        if isinstance(row, int) and row >= 0:
            changes["padding_idx"] = padding_row(row, rows, cuts)
        return changes

    return change


def _dropout(training: str, rate: str, *, channels: bool = False) -> Special:
    """In training every rank draws the mask of the whole tensor (or of whole channels), so that the result is that of one device."""

    def change(call: LocalCall) -> Mapping[str, Value] | None:
        if not call.operator.attributes.get(training) or not call.operator.attributes.get(rate):
            return None
        shape, cuts = call.inputs[0].shape, call.cuts(call.decision.inputs[0])
        if channels:
            shape, cuts = (*shape[:2], *(1 for _ in shape[2:])), tuple(cut for cut in cuts if cut.dim < 2)
        return {"shape": shape, "cuts": tuple(tuple(cut) for cut in cuts)}

    return change


def _drawn_like(call: LocalCall) -> Mapping[str, Value]:
    """Random numbers in the shape of an input: drawn for the whole of it."""
    return {"shape": call.inputs[0].shape, "cuts": tuple(tuple(cut) for cut in call.cuts(call.decision.inputs[0]))}


def _attention_dropout(call: LocalCall) -> Mapping[str, Value] | None:
    """As `_dropout`, with the mask on [..., heads, queries, keys]."""
    if not call.operator.attributes.get("dropout_p"):
        return None
    shape = (*call.outputs[0].shape[:-1], call.inputs[1].shape[-2])  # of the output: the queries may be read again for every batch
    return {"shape": shape, "cuts": tuple(tuple(cut) for cut in call.cuts(call.decision.outputs[0]))}


def _placed(call: LocalCall) -> Mapping[str, Value] | None:
    """A read or write at places of split dims: which those are, and where this rank's shards lie."""
    attributes = call.operator.attributes
    rank, dim, indices = len(call.inputs[0].shape), attributes.get("dim"), attributes.get("indices")
    given = [(i, index) for i, index in enumerate(indices) if isinstance(index, Ref)] if isinstance(indices, tuple) else []
    if any(call.inputs[index.index].dtype in ("bool", "uint8") for _, index in given):
        return None
    named = [i for i, _ in given]
    dims = [dim % rank] if isinstance(dim, int) and rank else named
    cuts = call.cuts(call.decision.inputs[0])
    held = {d: tuple(tuple(cut) for cut in cuts if cut.dim == d) for d in dims}
    splits = tuple((d, call.inputs[0].shape[d], own) for d, own in held.items() if own)
    return {"splits": splits} if splits else None


SPECIALS: Mapping[str, Special] = {
    "transformers.grouped_mm_fallback.default": shard_experts,
    "aten._grouped_mm.default": shard_experts,
    EXPERTS: shard_layer,
    **dict.fromkeys(PLACED_FUNCTIONS, _placed),
    **dict.fromkeys(LIKE, _drawn_like),
    "aten.native_dropout.default": _dropout("train", "p"),
    "aten.embedding.default": _masked_rows("weight", "indices", "padding_idx"),
    **LOCAL_SPECIALS,
    "aten.dropout.default": _dropout("train", "p"),
    "aten.feature_dropout.default": _dropout("train", "p", channels=True),
    "onnx.Dropout": _dropout("training_mode", "ratio"),
    "aten.scaled_dot_product_attention.default": _attention_dropout,
}
