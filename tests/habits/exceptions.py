"""Exceptions that the page states: habits that are neither right nor refused, and why."""

from __future__ import annotations

from collections.abc import Mapping

STAGES = ("1f1b", "zero bubble", "interleaved")
INTERLEAVED = ("interleaved",)
SPLIT = ("zero3", "megatron")
EVERYWHERE = ("data", "data, micro-batches", "zero3", "megatron", "search", *STAGES)

Where = Mapping[str, tuple[str, ...]]
"""Plans by the words that begin a habit's description."""
EXCEPTIONS: Mapping[str, Where] = {
    "Under stages a rank has the parameters of its own stage, and one that stands for all others. "
    "The 2-norm and the largest element of all gradients are right; norms of a part of them, and "
    "other norms, are of this stage: use `module.clip_grad_norm_(..., parameters=...)`.": {
        "clipping: clip_grad_norm_ of named parameters": STAGES,
        "clipping, tied weights: clip_grad_norm_ of named parameters": STAGES,
        "clipping: clip_grad_norm_, 1-norm": STAGES,
        "clipping, tied weights: clip_grad_norm_, 1-norm": STAGES,
        "clipping: clip_grad_norm_ of the layers": STAGES,
        "clipping, tied weights: clip_grad_norm_ of the layers": STAGES,
        "clipping: clip_grad_norm_ layer by layer": INTERLEAVED,
        "clipping, tied weights: clip_grad_norm_ layer by layer": INTERLEAVED,
        "clipping: each group of an optimizer": STAGES,
        "LBFGS": STAGES,
    },
    "Under stages sums over weights, their names, and state dicts are those of the rank's own "
    "stage, of which a rank that a plan leaves idle has none: use `autopar.save`, or torch's "
    "distributed checkpoints.": {
        "losses: weight decay added by the script": STAGES,
        "weights: their norm told": STAGES,
        "weights: names of parameters": STAGES,
        "states: names in state_dict": STAGES,
        "states: get_model_state_dict": (*STAGES, "search"),
        "states: whole tensors of state_dict": STAGES,
        "numbers: stopped where the norm of the weights grows": STAGES,
    },
    "Under stages a parameter of another stage is an `AttributeError` that says so.": {
        "freezing: the embedding": STAGES,
        "weights: module.apply": STAGES,
        "weights: get_parameter": STAGES,
        "weights: a weight tied after planning": STAGES,
    },
    "A buffer is up to date on the ranks whose stage writes it, and not on one that a plan leaves "
    "idle.": {
        "modes: pairs through one norm": ("search",),
        "buffers: a counter of calls": STAGES,
        "spectral norm": STAGES,
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
