"""Tensors that autograd saves of a call for the backward pass, and gradients that reuse their
output's memory.

A row is a set of operator kinds and words: the name of a tensor argument (saved), `result` or
`result1` (an output, saved), `a*b` (a product: `a` is saved where `b` has a gradient, and the
reverse). A kind without a row saves the tensors of its rule's `saves`. Source: torch's
tools/autograd/derivatives.yaml; for composite operators, the tensors that
`torch.autograd.graph.saved_tensors_hooks` reports.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir import DTYPE_BYTES
from autopar.ir.bodies import POINTWISE, body_of, parts
from autopar.ir.recipes import recipe_of

from .registry import RULES, Call
from .windows import CAUSAL, windows_of

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A buffer that a kernel makes and keeps, besides the graph's tensors: `nbytes` per element of
    an input or output.

    `factors`: names of factors that the tensor lacks; splitting one of them without communication
    divides the bytes too, and, with `inside`, splitting it with communication. `passed`: factors
    whose shards pass something on; the buffer is there where a split of one communicates, and with
    `gathered` holds one element for each shard of it, in place of the rank's own.
    """

    output: bool
    position: int
    nbytes: float
    factors: tuple[str, ...] = ()
    inside: bool = False
    passed: tuple[str, ...] = ()
    gathered: bool = False

    def times(self, shards: Floats | float, size: int) -> Floats | float:
        """The multiple of `nbytes`, for so many communicating shards of `passed` (of `size`)."""
        if not self.passed:
            return 1.0
        return (np.square(shards) / size if self.gathered else 1.0) * np.greater(shards, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeps:
    """Positions of the saved inputs and outputs, and further saved buffers."""

    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    made: tuple[Made, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """How the kernels of whoever runs a model save.

    `composite`: the CPU's, where dropout and RMS norm are several operators; else the fused ones of
    GPUs. `counted`: dropout by counted masks, as in the runtime, which is not composite. `fused`:
    what is between the products of experts, their scores included, is one kernel. `scores`: bytes
    for each score that a cross entropy has at its peak (None: torch's).
    """

    composite: bool = False
    counted: bool = False
    fused: bool = False
    scores: float | None = None


TORCH = Saving()


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """A composite operator's own count of saved tensors (from its inputs' gradients) and
    temporaries.
    """

    keeps: Callable[[Call, Sequence[bool], Saving], Keeps]
    scratch: Callable[[Call, Saving], tuple[Made, ...]]


OWN: dict[str, Own] = {}

CONVOLUTIONS = (
    "aten.conv1d.default aten.conv2d.default aten.conv3d.default aten.conv1d.padding "
    f"aten.conv2d.padding {CAUSAL}"
)

_ROWS: tuple[tuple[str, str], ...] = (
    ("aten.linear.default autopar.affine", "input*weight"),
    ("aten.addmm.default", "mat1*mat2"),
    ("aten.mm.default aten.bmm.default", "self*mat2"),
    ("aten.baddbmm.default", "batch1*batch2"),
    (
        "aten.matmul.default aten.linalg_matmul.default aten.mul.Tensor aten.multiply.Tensor "
        "aten.inner.default",
        "self*other",
    ),
    ("aten.div.Tensor aten.divide.Tensor aten.true_divide.Tensor", "self*other"),
    (
        "aten.mul.Scalar aten.multiply.Scalar aten.div.Scalar aten.divide.Scalar "
        "aten.true_divide.Scalar",
        "",
    ),
    ("aten.mv.default", "self*vec"),
    ("aten.dot.default", "self*tensor"),
    ("aten.outer.default aten.ger.default", "self*vec2"),
    ("aten.addcmul.default", "tensor1*tensor2"),
    ("aten.lerp.Scalar", ""),
    (
        "aten.relu.default aten.tanh.default aten.sigmoid.default aten.exp.default "
        "aten.sqrt.default aten.rsqrt.default",
        "result",
    ),
    (
        "aten.reciprocal.default aten.expm1.default aten.exp2.default aten.hardsigmoid.default",
        "result",
    ),
    (
        "aten.sum.default aten.sum.dim_IntList aten.mean.default aten.mean.dim aten.nansum.default",
        "",
    ),
    (
        "aten.repeat.default aten.tile.default aten.tril.default aten.triu.default "
        "aten.nan_to_num.default",
        "",
    ),
    (
        "aten.amax.default aten.amin.default aten.logsumexp.default aten.std.correction "
        "aten.std.dim aten.std.default",
        "self result",
    ),
    (
        "aten.max.dim aten.min.dim aten.sort.default aten.sort.stable aten.topk.default "
        "aten.kthvalue.default aten.median.dim",
        "result1",
    ),
    ("aten.where.self aten.where.ScalarOther aten.where.ScalarSelf", "condition"),
    ("aten.masked_fill.Scalar aten.masked_fill.Tensor aten.masked_select.default", "mask"),
    ("aten.gather.default aten.take_along_dim.default", "index"),
    ("aten.embedding.default", "indices"),
    (
        "aten.nll_loss.default aten.nll_loss_nd.default aten.mse_loss.default aten.l1_loss.default",
        "self target",
    ),
    ("aten.cross_entropy_loss.default", "target"),
    ("aten.layer_norm.default aten.native_layer_norm.default", "input weight bias"),
    ("aten.group_norm.default aten.native_group_norm.default", "input weight"),
    ("autopar.rotate.default", "x*cos x*sin"),
    ("aten.rms_norm.default aten._fused_rms_norm.default", "input weight"),
    (
        "aten.batch_norm.default aten._native_batch_norm_legit_functional.default",
        "input weight result1 result2",
    ),
    ("aten.scaled_dot_product_attention.default", "query key value result"),
    ("autopar.attention.default", "query key value sinks attn_mask result"),
    (CONVOLUTIONS, "input weight"),
    ("aten.convolution.default aten._convolution.default", "input weight"),
    (
        "aten.conv_transpose1d.default aten.conv_transpose2d.input aten.conv_transpose3d.input",
        "input weight",
    ),
    (
        "aten.max_pool1d_with_indices.default aten.max_pool2d_with_indices.default "
        "aten.max_pool3d_with_indices.default",
        "self result1",
    ),
    ("aten.dropout.default aten.feature_dropout.default", ""),
    ("aten.native_dropout.default", "result1"),
)

SAVED: Mapping[str, str] = {kind: words for kinds, words in _ROWS for kind in kinds.split()}


def _size_of(call: Call, *names: str) -> int:
    """The product of a shape attribute, or 1 where there is none."""
    sizes = call.get(*names)
    return math.prod(int(s) for s in sizes if isinstance(s, int)) if isinstance(sizes, tuple) else 1


def _row_statistics(count: int) -> Callable[[Call, bool], tuple[Made, ...]]:
    """`count` float32 numbers for each row that a norm spans."""

    def made(call: Call, composite: bool) -> tuple[Made, ...]:
        rank = len(call.inputs[0].shape)
        axis = call.get("axis", default=-1)
        sizes = (
            _size_of(call, "normalized_shape")
            if "normalized_shape" in call.operator.attributes
            else None
        )
        width = (
            sizes
            if sizes is not None
            else math.prod(
                call.inputs[0].shape[int(axis) % rank if isinstance(axis, int) else -1 :]
            )
        )
        return (Made(output=False, position=0, nbytes=4.0 * count / max(width, 1)),)

    return made


def _rms(call: Call, composite: bool) -> tuple[Made, ...]:
    """The reciprocal root of each row; the composite keeps wide copies before and after it."""
    rows = _row_statistics(1)(call, composite)
    size = DTYPE_BYTES[call.inputs[0].dtype]
    # A wide input is kept as it is, and counted as an input.
    wide = Made(output=False, position=0, nbytes=2.0 * max(size, 4) - size)
    return (*rows, wide) if composite else rows


def _group_statistics(call: Call, composite: bool) -> tuple[Made, ...]:
    """Mean and reciprocal deviation of each group of channels of each image."""
    groups = call.integer("num_groups", "group", default=call.inputs[0].shape[1])
    elements = call.inputs[0].size / max(call.inputs[0].shape[0] * groups, 1)
    return (Made(output=False, position=0, nbytes=8.0 / elements),)


def _mask(call: Call, composite: bool) -> tuple[Made, ...]:
    """A byte for each element; the composite keeps the scaled noise in the values' own type."""
    if not drops(call):
        return ()
    return (
        Made(
            output=True,
            position=0,
            nbytes=float(DTYPE_BYTES[call.outputs[0].dtype]) if composite else 1.0,
        ),
    )


def _probabilities(call: Call, composite: bool) -> tuple[Made, ...]:
    """The log-softmax of the scores."""
    return (Made(output=False, position=0, nbytes=float(DTYPE_BYTES[call.inputs[0].dtype])),)


def _indices(call: Call, composite: bool) -> tuple[Made, ...]:
    """Indices of the maxima, in int64."""
    return (Made(output=True, position=0, nbytes=8.0),)


def _log_sums(call: Call, composite: bool) -> tuple[Made, ...]:
    """Log-sum-exp of each row of scores, from which attention computes its weights again."""
    width = call.outputs[0].shape[-1]
    return (Made(output=True, position=0, nbytes=4.0 / width),)


def _attention(call: Call, composite: bool) -> tuple[Made, ...]:
    """The log-sum-exp, and a boolean mask as numbers; composite dropout keeps weights 4 times."""
    itemsize = float(DTYPE_BYTES[call.inputs[0].dtype])
    width = call.outputs[0].shape[-1]
    made = [*_log_sums(call, composite)]
    if composite and drops(call):
        keys = call.inputs[1].shape[-2]
        made = [Made(output=True, position=0, nbytes=4 * itemsize * keys / width)]
    mask = call.position("attn_mask")
    if mask is not None and call.inputs[mask].dtype == "bool":
        made.append(Made(output=False, position=mask, nbytes=itemsize))
    return tuple(made)


def _with_borders(call: Call, composite: bool) -> tuple[Made, ...]:
    """The input with the rows of the neighbours around it, where a split of the space brings any
    (the border itself is not counted).
    """
    windows = windows_of(call)
    bring = tuple(f"y{i}" for i, window in enumerate(windows) if max(window.low, window.high) > 0)
    itemsize = float(DTYPE_BYTES[call.inputs[0].dtype])
    return (Made(output=False, position=0, nbytes=itemsize, passed=bring),) if bring else ()


_MADE: Mapping[str, Callable[[Call, bool], tuple[Made, ...]]] = {
    "aten.layer_norm.default": _row_statistics(2),
    "aten.rms_norm.default": _rms,
    "aten.group_norm.default": _group_statistics,
    "aten.dropout.default": _mask,
    "aten.cross_entropy_loss.default": _probabilities,
    "aten.max_pool2d.default": _indices,
    "aten.max_pool3d.default": _indices,
    "aten.scaled_dot_product_attention.default": _attention,
    "autopar.attention.default": _log_sums,
    **dict.fromkeys(CONVOLUTIONS.split(), _with_borders),
}


def drops(call: Call) -> bool:
    """Whether a dropout, or an attention with dropout, drops anything."""
    rate = call.get("p", "ratio", "dropout_p", default=0.0)
    return bool(rate) and call.get("train", "training_mode", default=True) is not False


def keeps(call: Call, gradients: Sequence[bool], saving: Saving = TORCH) -> Keeps:
    """The tensors that a call keeps; `gradients`: whether each input has a gradient."""
    kind = call.operator.kind
    composite = saving.composite and not (saving.counted and drops(call))
    # Without a gradient to pass on, autograd does not record the call.
    if not any(gradients):
        return Keeps()
    if kind in OWN:
        return OWN[kind].keeps(call, gradients, saving)
    if kind == CROSS_ENTROPY and saving.scores is not None:
        return Keeps()
    if kind not in SAVED:
        return _by_rule(call, composite)
    inputs: list[int] = []
    outputs: list[int] = []
    for word in SAVED[kind].split():
        names = [call.position(name) for name in word.split("*")]
        # The gradient of one side of a product is the output's times the other side.
        if len(names) == 2:
            one, other = names
            inputs += [
                a
                for a, b in ((one, other), (other, one))
                if a is not None and b is not None and gradients[b]
            ]
        elif word.startswith("result"):
            outputs += [i for i in (int(word[6:] or 0),) if i < len(call.outputs)]
        elif names[0] is not None:
            inputs.append(names[0])
    made = _made(call, composite)
    recipe = recipe_of(call.operator)
    if recipe is not None and call.get("keeps_narrow") and 0 in inputs:
        inputs = [index for index in inputs if index != 0]
        made = (*made, Made(output=False, position=0, nbytes=recipe.bytes))
    return Keeps(inputs=tuple(dict.fromkeys(inputs)), outputs=tuple(outputs), made=made)


def _by_rule(call: Call, composite: bool) -> Keeps:
    """The tensors that the call's rule names."""
    entry = RULES[call.operator.kind]
    if entry.view or not entry.saves:
        return Keeps(made=_made(call, composite))
    if entry.saves == "output":
        return Keeps(outputs=tuple(range(len(call.outputs))))
    return Keeps(inputs=tuple(range(len(call.inputs))), made=_made(call, composite))


def _made(call: Call, composite: bool) -> tuple[Made, ...]:
    return _MADE[call.operator.kind](call, composite) if call.operator.kind in _MADE else ()


CROSS_ENTROPY = "aten.cross_entropy_loss.default"
_SCRATCH: Mapping[str, float] = {
    CROSS_ENTROPY: 1,
    "aten.pow.Tensor_Scalar": 2,
    "aten.rsqrt.default": 1,
    "aten.where.self": 1,
}
"""Temporaries of the backward formula besides the gradients, as multiples of the first input."""


def backward_scratch(call: Call, saving: Saving = TORCH) -> tuple[Made, ...]:
    """Temporaries of a call's backward formula."""
    if call.operator.kind in OWN:
        return OWN[call.operator.kind].scratch(call, saving)
    if (recipe := recipe_of(call.operator)) is not None:
        # Narrow copies of the weights and of the result's gradient.
        places = ((False, 1), (True, 0))
        return tuple(Made(output=o, position=i, nbytes=recipe.bytes) for o, i in places)
    times = _SCRATCH.get(call.operator.kind)
    if call.operator.kind == CROSS_ENTROPY and saving.scores is not None:
        more = max(saving.scores - DTYPE_BYTES[call.inputs[0].dtype], 0.0)  # beside the gradient
        return (Made(output=False, position=0, nbytes=more),)
    if call.operator.kind == POINTWISE and not saving.fused:
        # The values inside, which are made again, and their gradients.
        inside = sum(1 for _ in parts(body_of(call.operator))) - 1
        nbytes = 2.0 * inside * DTYPE_BYTES[call.outputs[0].dtype]
        return (Made(output=True, position=0, nbytes=nbytes),)
    if not times:
        return ()
    nbytes = float(times * DTYPE_BYTES[call.inputs[0].dtype])
    return (Made(output=False, position=0, nbytes=nbytes),)


def _kinds(text: str) -> frozenset[str]:
    return frozenset(text.split())


_IDENTITIES = _kinds(
    "aten.alias.default aten.slice.Tensor aten.narrow.default aten.lift_fresh.default "
    "aten.detach_.default aten.positive.default "
)
_CASTS = _kinds(
    "aten.to.dtype aten.to.dtype_layout aten.to.device aten.to.other aten._to_copy.default "
    "aten.type_as.default"
)
_COPIES_WHERE_NEEDED = _kinds(
    "aten.reshape.default aten._unsafe_view.default aten.flatten.using_ints "
    "aten.contiguous.default aten.ravel.default "
)
_DROPOUTS = _kinds("aten.dropout.default aten.feature_dropout.default")


def shares_memory(call: Call, *, contiguous: bool) -> bool:
    """Whether the output shares the first input's memory; `contiguous`: the input is stored in its
    dims' order.
    """
    kind = call.operator.kind
    if not call.inputs:
        return False
    if kind in _COPIES_WHERE_NEEDED:
        # A reshape to the same shape is a view however the input is stored; `contiguous` then
        # copies.
        same = kind != "aten.contiguous.default" and call.inputs[0].shape == call.outputs[0].shape
        return contiguous or same
    if kind in _CASTS:
        # `_to_copy` copies even if the type stays.
        return call.inputs[0].dtype == call.outputs[0].dtype and kind != "aten._to_copy.default"
    if kind in _DROPOUTS:
        return not drops(call)
    return kind in _IDENTITIES or RULES[kind].view


def shows(kind: str) -> bool:
    """Whether operators of a kind give their first input in another shape, type or place alone."""
    return kind in _CASTS | _COPIES_WHERE_NEEDED | {"aten.clone.default"} or RULES[kind].view


_SUMS = _kinds("aten.add.Tensor aten.add.Scalar aten.sub.Scalar autopar.add")
_FIRST = _kinds("aten.sub.Tensor aten.contiguous.default aten.clone.default")
_JOINS = _kinds("aten.cat.default aten.stack.default aten.sum.default")
_CUTS = _kinds("aten.slice.Tensor aten.narrow.default aten.select.int aten.diagonal.default")


def passes_gradient(call: Call, position: int, *, view: bool) -> bool:
    """Whether the gradient of an input is (a view of) the output's gradient rather than memory of
    its own.
    """
    kind = call.operator.kind
    given = call.inputs[position]
    made = call.outputs[0]
    # The gradient of a cut's input is new memory: zeros around the output's.
    if len(call.outputs) > 1 or given.dtype != made.dtype or kind in _CUTS:
        return False
    # Of joined tensors each has a part of the output's gradient, and a sum's input has it expanded.
    if kind in _JOINS:
        return True
    if kind in _SUMS or (position == 0 and kind in _FIRST):
        return given.shape == made.shape
    return position == 0 and (view or RULES[kind].view) and given.size == made.size
