"""Models named by a configuration alone, `hf:path/config.json`.

Their graphs are made without weights and without torch.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from .errors import UsageError
from .frontends.load import ModelOptions, load_model
from .ir import DTYPE_BYTES
from .model import LoadedModel
from .plan import Plan

PREFIX = "hf:"
SEQUENCE = "sequence"
"""The dim of such a model that `--seq` sizes."""


def load_any(model: Any, options: ModelOptions, example_inputs: Any = None) -> LoadedModel:
    """`load_model`, which takes `hf:path/config.json` too."""
    if not (isinstance(model, str) and model.startswith(PREFIX)):
        return load_model(model, options, example_inputs)
    from autopar.costmodel.known.shape import Shape
    from autopar.costmodel.known.transformer import transformer

    wrong = [
        name
        for name in ("shapes", "frozen", "trained", "loss", "parameters")
        if getattr(options, name)
    ]
    if wrong or set(options.dims) - {SEQUENCE}:
        raise UsageError(
            f"{model}: a configuration takes --batch, --seq and --dtype, not "
            f"{', '.join(wrong) or '--dim'}"
        )
    sequence = options.dims.get(SEQUENCE)
    if sequence is not None and sequence < 1:
        raise UsageError(f"--seq is {sequence}; it must be at least 1")
    shape = replace(Shape.of(model.removeprefix(PREFIX), sequence=sequence), dropout=False)
    dtype = options.dtype or "bfloat16"
    assert dtype in DTYPE_BYTES, "checked by ModelOptions"
    graph = transformer(shape, batch=options.batch or 1, dtype=dtype).graph
    return LoadedModel(graph=graph, source=graph, notes=(_not_run(model),), dtype=dtype)


def _not_run(model: str) -> str:
    return (
        f"{model} is a configuration: its plan can be priced and read, not run; plan and run the "
        "model itself, from ONNX or PyTorch"
    )


def require_weights(model: Any) -> None:
    """A `UsageError` for a configuration, which has no weights and no program to run."""
    if isinstance(model, str) and model.startswith(PREFIX):
        raise UsageError(_not_run(model))


def sizes_of_plan(model: Any, plan: Plan, options: ModelOptions) -> ModelOptions:
    """The options with the sequence length of the plan, where the model is a configuration."""
    if not (isinstance(model, str) and model.startswith(PREFIX)):
        return options
    tokens = plan.model.inputs.get("tokens")
    return options if tokens is None else replace(options, dims={SEQUENCE: tokens.shape[1]})
