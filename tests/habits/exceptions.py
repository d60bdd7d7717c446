"""Exceptions that the page states: habits that are neither right nor refused, and why."""

from __future__ import annotations

from collections.abc import Mapping

STAGES = ("1f1b", "zero bubble", "interleaved")
STAGED = (*STAGES, "search")
"""Plans of which some ranks do not have all parameters: the search leaves a rank idle."""
SPLIT = ("zero3", "megatron")
EVERYWHERE = ("data", "data, micro-batches", "zero3", "megatron", "search", *STAGES)

Where = Mapping[str, tuple[str, ...]]
"""Plans by the words that begin a habit's description."""
EXCEPTIONS: Mapping[str, Where] = {
    "A state dict has stand-ins for the parameters of other stages, and on a rank that a plan "
    "leaves idle, also that of torch's `get_model_state_dict`. The rank that would write them to a "
    "file is refused: use `autopar.save`, `autopar.export_weights`, or torch's distributed "
    "checkpoints.": {
        "states: get_model_state_dict": (*STAGES, "search"),
        "states: whole tensors of state_dict": ("search",),
        "states: torch.save of state_dict": ("search",),
    },
    "A rank that a plan leaves idle has no parameters, and refuses numbers that are made of them, "
    "while the others go on.": {
        "losses: weight decay added by the script": ("search",),
        "weights: their norm told": ("search",),
        "numbers: stopped where the norm of the weights grows": ("search",),
        "clipping: clip_grad_norm_, 1-norm": ("search",),
        "clipping, tied weights: clip_grad_norm_, 1-norm": ("search",),
        "LBFGS": ("search",),
    },
    "Split outputs and parameters are DTensors, of which torch itself refuses some operators, with "
    "an error of its own.": {
        "losses: a penalty on the logits beside": ("data", "zero3"),
        "losses: the loss of the script from the logits beside": (
            "data",
            "data, micro-batches",
            "zero3",
        ),
        "losses: weight decay added by the script": SPLIT,
        "backward: anomaly detection": SPLIT,
        "gradients: rows zeroed": SPLIT,
        "torch's optimizers: Rprop": SPLIT,
        "torch's optimizers: Adafactor": SPLIT,
    },
    "Methods of the model are not part of the planned module: an `AttributeError` says so.": {
        "calls: a method of the model": EVERYWHERE
    },
}


def exception_of(habit: str, plan: str) -> str | None:
    """The text of the exception that holds for a habit under a plan; None if there is none."""
    for text, where in EXCEPTIONS.items():
        if any(habit.startswith(words) and plan in plans for words, plans in where.items()):
            return text
    return None
