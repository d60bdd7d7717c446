"""Models named by a configuration alone, `hf:path/config.json`, beside all others."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from .errors import UsageError
from .frontends.huggingface import SEQUENCE, configured, example_inputs
from .frontends.load import ModelOptions, load_model
from .ir import Graph
from .model import LoadedModel
from .plan import Plan

PREFIX = "hf:"
DTYPE = "bfloat16"
"""The type of a configured model where none is asked for."""


def load_any(model: Any, options: ModelOptions, given: Any = None) -> LoadedModel:
    """`load_model`, which takes `hf:path/config.json` too."""
    if not is_configuration(model):
        return load_model(model, options, given)
    wrong = [name for name in ("shapes", "frozen", "trained") if getattr(options, name)]
    if wrong or set(options.dims) - {SEQUENCE}:
        raise UsageError(
            f"{model}: a configuration takes --batch, --seq, --loss and --dtype, not "
            f"{', '.join(wrong) or '--dim'}"
        )
    dtype = options.dtype or DTYPE
    made = configured(str(model).removeprefix(PREFIX), dtype)
    sequence = options.dims.get(SEQUENCE)
    has_labels = options.train and options.loss is None
    inputs = example_inputs(made, options.batch or 1, sequence, labels=has_labels)
    loaded = load_model(made.module, replace(options, dims={}, batch=None, dtype=None), inputs)
    return replace(
        loaded,
        build=functools.cache(made.build),
        given=None,
        reload=None,
        dtype=dtype,
        notes=(_sized(loaded.graph), *made.notes, *_idle(loaded.graph), *loaded.notes),
    )


def is_configuration(model: Any) -> bool:
    """Whether a MODEL is `hf:path/config.json`."""
    return isinstance(model, str) and model.startswith(PREFIX)


def _sized(graph: Graph) -> str:
    parameters = sum(tensor.size for tensor in graph.parameters)
    first = graph.tensors[graph.inputs[0]].shape
    what = " x ".join(map(str, first))
    return (
        f"{graph.name}: {parameters / 1e9:.3f} billion parameters; a batch is {what} "
        f"({graph.inputs[0]}; --batch, --seq)"
    )


def _idle(graph: Graph) -> list[str]:
    """Tell which parts of the model take no part in such a batch, as towers for images."""
    read = {name for operator in graph.operators for name in operator.inputs}
    idle: dict[str, int] = {}
    for tensor in graph.parameters:
        if tensor.name not in read:
            part = ".".join(tensor.name.split(".")[:2])
            idle[part] = idle.get(part, 0) + tensor.size
    return [
        f"{part} ({size / 1e9:.3f} billion parameters) takes no part in such a batch: it is "
        "stored, not computed"
        for part, size in idle.items()
    ]


def sizes_of_plan(model: Any, plan: Plan, options: ModelOptions) -> ModelOptions:
    """The options with the sequence length of the plan, where the model is a configuration."""
    if not is_configuration(model):
        return options
    for name in ("input_ids", "labels"):
        spec = plan.model.inputs.get(name)
        if spec is not None and len(spec.shape) > 1:
            return replace(options, dims={SEQUENCE: spec.shape[1]})
    return options
