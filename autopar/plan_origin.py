"""The cluster and the model of a plan, loaded again."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from autopar.costmodel import Cluster, load_cluster, parse_span, presets
from autopar.costmodel.frameworks import changed, framework_named, framework_of

from .analysis.import_proofs import LEFT_OUT
from .configured import empty_inputs, is_configuration, load_any
from .errors import UsageError
from .frontends.load import ONNX_ENDINGS, ModelOptions, load_model
from .ir.dtype import FLOATS
from .model import LoadedModel
from .operators import bring_rules
from .plan import Plan


def cluster_of_plan(
    plan: Plan, cluster: str | Path | Cluster | None = None, target: str | None = None
) -> Cluster:
    """The cluster of a plan, or `cluster` instead, sized to the plan's devices, idle ones too.

    It must have the levels of the mesh. What is priced there is run by the plan's framework, or by
    that of `target` instead.
    """
    if cluster is None and plan.cluster not in presets():
        raise UsageError(
            f"the plan's cluster {plan.cluster!r} is no preset: give its file with --cluster"
        )
    chosen = cluster if isinstance(cluster, Cluster) else load_cluster(cluster or plan.cluster)
    planned = changed(framework_named(plan.framework), plan.habits)
    run = chosen.run_by(framework_of(target) if target else planned)
    sized = run.sized(plan.devices + plan.unused)
    for axis in plan.mesh:
        if axis.level != "device":
            parse_span(sized, axis.level, axis.size)
    return sized


def known_cluster(plan: Plan, cluster: str | None, target: str | None = None) -> Cluster | None:
    """The cluster of a plan (`cluster_of_plan`).

    It is None if none is given and the plan's is no preset.
    """
    return (
        None
        if cluster is None and plan.cluster not in presets()
        else cluster_of_plan(plan, cluster, target)
    )


def model_of_plan(
    model: Any,
    plan: Plan,
    example_inputs: Any = None,
    *,
    loss: str | Callable[..., Any] | None = None,
    trust: bool = False,
) -> LoadedModel:
    """Load the model of a plan, with the plan's input sizes and dtype.

    Raise `PlanError` if it does not match.
    """
    options = ModelOptions(train=plan.model.mode == "train", loss=loss, trust=trust)
    left_out = False if plan.model.proof == LEFT_OUT else None
    options = replace(options, precision=plan.model.precision, proof=left_out)
    if not plan.model.onnx:
        options = replace(options, outputs=plan.model.outputs)
    if isinstance(model, LoadedModel):
        loaded = model
    elif hasattr(model, "named_parameters"):
        given = example_inputs if example_inputs is not None else _example_inputs(plan, model)
        batch = None if example_inputs is None else _batch_of(plan)
        loaded = load_model(
            model, replace(options, batch=batch, dtype=_cast_of(plan, model)), given
        )
    elif _is_onnx(model):
        loaded = _onnx_of_plan(model, plan, options)
    else:
        fixed = str(model).endswith(".pt2")
        sized = (
            options if fixed else replace(options, batch=_batch_of(plan), dtype=plan.model.dtype)
        )
        sizes = plan.model.inputs if is_configuration(model) else None
        loaded = load_any(model, sized, None if sizes else example_inputs, sizes=sizes)
    plan.require_match(loaded.graph)
    return bring_rules(loaded, plan)


def _onnx_of_plan(
    model: Any, plan: Plan, options: ModelOptions, batch: int | None = None
) -> LoadedModel:
    """The ONNX model with the plan's input shapes (or another `batch`).

    A batch that is fixed in the file is replaced.
    """
    options = replace(options, dtype=plan.model.dtype, parameters=set(plan.parameters))
    options = replace(options, values=plan.model.values, outputs=plan.model.outputs)
    old = _batch_of(plan)
    shapes = {name: spec.shape for name, spec in plan.model.inputs.items()}
    if batch is not None:
        shapes = {
            name: (batch, *shape[1:]) if shape and shape[0] == old else shape
            for name, shape in shapes.items()
        }
    try:
        return load_any(model, replace(options, shapes=shapes))
    except UsageError:
        if old is None:
            raise
        return load_any(model, replace(options, batch=batch or old))


def model_of_batch(
    model: str | Path, plan: Plan, batch: int, *, loss: str | None = None, trust: bool = False
) -> LoadedModel:
    """The model of a plan with another global batch; `UsageError` if that is impossible."""
    options = ModelOptions(
        train=plan.model.mode == "train", loss=loss, dtype=plan.model.dtype, trust=trust
    )
    options = replace(options, precision=plan.model.precision, outputs=plan.model.outputs)
    if _is_onnx(model):
        loaded = _onnx_of_plan(model, plan, options, batch)
    else:
        sizes = plan.model.inputs if is_configuration(model) else None
        loaded = load_any(model, replace(options, batch=batch), sizes=sizes)
    return bring_rules(loaded, plan)


def _is_onnx(model: Any) -> bool:
    return type(model).__name__ == "ModelProto" or (
        isinstance(model, (str, Path)) and str(model).endswith(ONNX_ENDINGS)
    )


def _example_inputs(plan: Plan, module: Any) -> Any:
    """The inputs, named if all names are arguments of the module, or else positional."""
    empty = empty_inputs(plan.model.inputs)
    return (
        empty
        if set(empty) <= set(inspect.signature(module.forward).parameters)
        else tuple(empty.values())
    )


def _batch_of(plan: Plan) -> int | None:
    sizes = [spec.shape[0] for spec in plan.model.inputs.values() if spec.shape]
    return sizes[0] if sizes else None


def _cast_of(plan: Plan, module: Any) -> str | None:
    """The plan's floating-point type if the module has another one.

    A copy of the module in that type is run.
    """
    own = {
        str(value.dtype).removeprefix("torch.")
        for value in module.parameters()
        if value.is_floating_point()
    }
    if plan.model.dtype is not None:
        return plan.model.dtype if own != {plan.model.dtype} else None
    planned = {p.dtype for p in plan.parameters.values() if p.dtype in FLOATS}
    return planned.pop() if len(own) == len(planned) == 1 and planned != own else None
