"""Rules of the rarer losses: rows are split if their losses are kept, summed, or averaged with
equal weights.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir import DTYPE_BYTES
from autopar.ir.stored_products import LINEAR_LOSS

from .indexing import MEAN, SUM
from .registry import Call, register
from .saved_for_backward import OWN, Keeps, Made, Own, Saving
from .selection import all_whole
from .shape import letters


def _reduced(call: Call, names: list[str]) -> tuple[str, str]:
    """The dims of the result and the clause, for losses in `names`."""
    reduction = call.integer("reduction", default=MEAN)
    word = {MEAN: "mean", SUM: "sum"}.get(reduction, "")
    return (
        ("", f" | {', '.join(names)}: {word}" if names else "") if word else (" ".join(names), "")
    )


def _element_loss(call: Call) -> str:
    """Every element of operands that broadcast has a loss."""
    depth = max(len(tensor.shape) for tensor in call.inputs)
    names = letters(depth)
    out, tail = _reduced(call, names)
    return (
        f"{', '.join(' '.join(names[depth - len(t.shape) :]) for t in call.inputs)} -> {out}{tail}"
    )


def _vector_loss(call: Call) -> str:
    """Every vector along the last dim has a loss; targets have one number a vector."""
    depth = max(len(tensor.shape) for tensor in call.inputs)
    if depth == 0:
        return all_whole(call)
    names = letters(depth - 1)
    vector = [*names, "!v"]
    target = call.position("target")
    ins = [
        names if i == target else vector[depth - len(t.shape) :] for i, t in enumerate(call.inputs)
    ]
    out, tail = _reduced(call, names)
    return f"{', '.join(' '.join(dims) for dims in ins)} -> {out}{tail}"


def _margin_loss(call: Call) -> str:
    """Every row has a loss over its classes, which stay whole.

    Its target is a class or a list of classes, and every class may have a weight.
    """
    shape = call.inputs[0].shape
    # The second output is no loss: a mean over shards would divide it as well.
    if len(shape) < 2 or (
        len(call.outputs) > 1 and call.integer("reduction", default=MEAN) == MEAN
    ):
        return all_whole(call)
    ins = []
    for position, tensor in enumerate(call.inputs):
        if position == call.position("weight"):
            ins.append("!c")
        else:
            ins.append("n !c" if len(tensor.shape) > 1 else "n")
    out, tail = _reduced(call, ["n"])
    outs = [out, *("n !c" for _ in call.outputs[1:])]
    return f"{', '.join(ins)} -> {', '.join(outs)}{tail}"


def _ctc_loss(call: Call) -> str:
    """Every sequence of the batch has a loss, where targets are padded and lengths are tensors."""
    # Targets in one row lie one behind the other, each from where the lengths of all before it end.
    if len(call.inputs) < 4 or len(call.inputs[0].shape) != 3 or len(call.inputs[1].shape) != 2:
        return all_whole(call)
    out, tail = _reduced(call, ["n"])
    return f"!t n !c, n !s, n, n -> {out}{tail}"


def _counted(call: Call) -> str:
    """A summed loss together with the sum of its rows' weights; a mean needs both whole."""
    if call.integer("reduction", default=MEAN) != SUM or len(call.inputs[0].shape) < 2:
        return all_whole(call)
    names = letters(len(call.inputs[0].shape))
    rows = [names[0], *names[2:]]
    ins = [" ".join([names[0], "!c", *names[2:]]), " ".join(rows), *("!c" for _ in call.inputs[2:])]
    return f"{', '.join(ins)} -> , | {', '.join(rows)}: sum"


SCORES_AT_ONCE = 2**27
"""As in `autopar.torch_operators.linear_cross_entropy`."""
BYTES_OF_SCORE = 4 + 4
"""Of a score that is worked on: as it was multiplied, its chance, and what the products read."""


def _linear_loss(call: Call) -> str:
    """The losses of rows, added up; classes are split as those of a cross entropy."""
    rows = letters(len(call.inputs[0].shape) - 1)
    flat = len(call.inputs[2].shape) == 1 and len(rows) > 1
    target = f"({' '.join(rows)})" if flat else " ".join(rows)
    tail = f"{', '.join(rows)}: sum; " if rows else ""
    return f"{' '.join(rows)} !h, v !h, {target} -> | {tail}v: vocabulary"


def _keeps_gradients(call: Call, gradients: Sequence[bool], saving: Saving) -> Keeps:
    """The gradients of rows and of the matrix, which the forward pass makes.

    Where all scores are made at once, they are kept beside the rows.
    """
    if saving.scores is not None:
        size = float(DTYPE_BYTES[call.inputs[0].dtype])
        return Keeps(inputs=(0,), made=(_scores(call, size),))
    made = (
        Made(output=False, position=place, nbytes=float(DTYPE_BYTES[call.inputs[place].dtype]))
        for place in range(2)
        if gradients[place]
    )
    return Keeps(made=tuple(made))


def _scores(call: Call, nbytes: float) -> Made:
    """So many bytes for each of all scores."""
    each = nbytes * call.inputs[1].shape[0] / call.inputs[0].shape[-1]
    return Made(output=False, position=0, nbytes=each, factors=("v",), inside=True)


def _scores_at_once(call: Call, saving: Saving) -> tuple[Made, ...]:
    """The scores of a few rows, as far as they are more than the matrix.

    The forward pass has them, right before a backward pass that they count to. That one has the
    gradient of the matrix twice instead.
    """
    if saving.scores is not None:
        return (_scores(call, max(saving.scores - DTYPE_BYTES[call.inputs[0].dtype], 0.0)),)
    rows = call.inputs[0].size / max(call.inputs[0].shape[-1], 1)
    scores = min(rows * call.inputs[1].shape[0], SCORES_AT_ONCE)
    more = max(BYTES_OF_SCORE * scores - call.inputs[1].bytes, 0.0)
    return (Made(output=False, position=0, nbytes=more / max(call.inputs[0].size, 1)),)


register(LINEAR_LOSS, _linear_loss, products=("",))
OWN[LINEAR_LOSS] = Own(keeps=_keeps_gradients, scratch=_scores_at_once)
register(
    "aten.soft_margin_loss.default aten.poisson_nll_loss.default aten.hinge_embedding_loss.default",
    _element_loss,
)
register("aten.margin_ranking_loss.default", _element_loss)
register("aten.cosine_embedding_loss.default aten.triplet_margin_loss.default", _vector_loss)
register(
    "aten.multi_margin_loss.default aten.multilabel_margin_loss.default "
    "aten.multilabel_margin_loss_forward.default",
    _margin_loss,
)
register("aten.ctc_loss.Tensor aten.ctc_loss.IntList", _ctc_loss)
register("aten.nll_loss_forward.default aten.nll_loss2d_forward.default", _counted)
