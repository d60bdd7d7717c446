"""Rules of look-ups and of the loss functions that index classes."""

from __future__ import annotations

from .registry import Call, register
from .shape import letters


def _embedding(call: Call) -> str:
    """Rows of a table are read at the indices.

    Where gradients are scaled by how often a row occurs, every rank needs all rows and indices.
    """
    if not call.get("scale_grad_by_freq"):
        return "v h, * -> * h | v: sum; v: masked"
    index = " ".join(f"!{name}" for name in letters(len(call.inputs[1].shape)))
    return f"!v h, {index} -> {index} h"


register("aten.embedding.default", _embedding)


MEAN = 1
SUM = 2
"""Torch's numbers of the reductions of a loss; 0 is none."""


def _class_loss(call: Call) -> str:
    """Cross entropy with classes in dim 1.

    Rows are split where their losses are added up or returned one by one, not where they are
    averaged.
    """
    shape = call.inputs[0].shape
    reduction = call.integer("reduction", default=MEAN)
    names = [f"{'!' if reduction == MEAN else ''}{name}" for name in letters(len(shape))]
    place = 1 if len(shape) > 1 else 0
    # A mean divides by the number (or weight) of the rows counted, which differs from shard to
    # shard. Classes are split as in Megatron-LM: maxima, sums and the target's score are exchanged.
    # Targets that are probabilities would need all of their row's scores.
    split = call.operator.kind == "aten.cross_entropy_loss.default" and not call.inputs[1].is_float
    classes = letters(len(shape))[place] if split else f"!{letters(len(shape))[place]}"
    rows = [name for i, name in enumerate(names) if i != place]
    scores = [*names[:place], classes, *names[place + 1 :]]
    inputs = []
    for position, tensor in enumerate(call.inputs):
        if position == call.position("weight"):
            inputs.append([classes])
        else:
            inputs.append(scores if tensor.shape == shape else rows)
    text = (
        f"{', '.join(' '.join(dims) for dims in inputs)} -> "
        f"{' '.join(rows) if reduction == 0 else ''}"
    )
    clauses = [f"{', '.join(rows)}: sum"] if reduction == SUM and rows else []
    clauses += [f"{classes}: vocabulary"] if split else []
    return text + (f" | {'; '.join(clauses)}" if clauses else "")


def _element_loss(call: Call) -> str:
    """Every element has a loss, which is kept, averaged or summed; operands are broadcast."""
    shape = call.inputs[0].shape
    names = letters(len(shape))
    inputs = []
    for tensor in call.inputs:
        missing = len(shape) - len(tensor.shape)
        pairs = zip(names[missing:], tensor.shape, shape[missing:], strict=True)
        inputs.append(" ".join("1" if size == 1 != full else name for name, size, full in pairs))
    reduction = call.integer("reduction", default=MEAN)
    word = {MEAN: "mean", SUM: "sum"}.get(reduction, "")
    tail = f" | {', '.join(names)}: {word}" if word and names else ""
    return f"{', '.join(inputs)} -> {'' if word else ' '.join(names)}{tail}"


register(
    "aten.cross_entropy_loss.default aten.nll_loss_nd.default aten.nll_loss.default", _class_loss
)
register(
    "aten.mse_loss.default aten.l1_loss.default aten.smooth_l1_loss.default "
    "aten.huber_loss.default "
    "aten.binary_cross_entropy.default aten.binary_cross_entropy_with_logits.default "
    "aten.kl_div.default",
    _element_loss,
)
