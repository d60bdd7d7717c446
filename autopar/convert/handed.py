"""What stages share that PyTorch's pipelines do not carry: values past a stage or out of order in memory, parameters, inputs."""

from __future__ import annotations

from collections.abc import Iterable

from ..plan import Plan
from ..plan_parts import OperatorPlan
from .setup import EMBEDDINGS, is_product

# Operators that give views, or outputs whose memory is in another order than their dims; by the name without overload.
_MOVES = frozenset(
    f"aten.{name}"
    for name in (
        "transpose", "permute", "t", "T", "mT", "adjoint", "swapaxes", "swapdims", "movedim", "moveaxis", "expand", "expand_as", "select",
        "slice", "narrow", "split", "split_with_sizes", "chunk", "unbind", "tensor_split", "diagonal", "unfold", "as_strided", "einsum",
        "scaled_dot_product_attention",
    )
)  # fmt: skip
_ORDERED = ("aten.layer_norm.default", "aten.rms_norm.default", "aten.contiguous.default", *EMBEDDINGS)


def handed_otherwise(plan: Plan) -> Iterable[str]:
    """What the target lacks: it sends contiguous tensors from each stage to the next alone."""
    firsts, stage = {spec.first for spec in plan.stages[1:]}, 0
    at: dict[str, int] = {}  # the stage that made a tensor, or read a parameter first
    moved: set[str] = set()  # tensors that may be out of order in memory
    found: dict[str, None] = {}
    for name, operator in plan.operators.items():
        stage += name in firsts
        for tensor, _ in operator.inputs:
            why = _why(plan, tensor, operator, at.setdefault(tensor, stage), stage, tensor in moved)
            found |= {why: None} if why else {}
        at |= {tensor: stage for tensor, _ in operator.outputs}
        if _moves(operator, moved):
            moved |= {tensor for tensor, _ in operator.outputs}
    return found


def _why(plan: Plan, tensor: str, reader: OperatorPlan, made: int, stage: int, moved: bool) -> str:
    if tensor in plan.parameters:
        return f"parameter {tensor!r}, which stages {made} and {stage} read" if made != stage else ""
    if tensor in plan.model.inputs:
        late = stage > 0 and not reader.kind.startswith("autopar.")  # a loss beside the model has its target from the schedule
        return f"input {tensor!r}, which stage {stage} reads and only the first is given" if late else ""
    if stage - made > 1:
        return f"tensor {tensor!r}, which passes from stage {made} to {stage}"
    return f"tensor {tensor!r}, which stages hand on and which may not be contiguous" if stage > made and moved else ""


def _moves(operator: OperatorPlan, moved: set[str]) -> bool:
    """Whether the operator's outputs may be out of order: products and norms write anew, others keep what their inputs have."""
    if operator.kind.rpartition(".")[0] in _MOVES:
        return True
    return not (is_product(operator) or operator.kind in _ORDERED) and any(tensor in moved for tensor, _ in operator.inputs)
