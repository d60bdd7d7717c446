"""The context's effect on `autopar.plan`.

It sets devices, the scheme or the cuts of operators, and how gradients are reduced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.errors import UsageError
from autopar.ir import Graph
from autopar.ir.dtype import HALVES
from autopar.model import LoadedModel
from autopar.order.part_gathers import batch_of
from autopar.plan import Plan
from autopar.planning.model.pins import Pins, Restriction, parse_pin, together
from autopar.sharding.analysis import analyse
from autopar.sharding.program import Redistribute, chain_collectives
from autopar.sharding.schedule import Reductions

from .cuts import CutOperators, cuts_of
from .files import is_plan, loaded_strategies
from .marks import ATTRIBUTES, marked, own_parameters
from .state import Context

_FIXED = (
    "{name}={value!r} is another than the {wanted!r} of the auto-parallel context; give it in one "
    "place"
)


def in_context(context: Context, model: LoadedModel, given: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `plan_loaded` with those of the context.

    Arguments of `plan` must not contradict them.
    """
    context.require()
    _require_marks(context, model)
    wanted = _of_mode(context, model)
    if context.gradient_fp32_sync and given.get("reduce") is None and _is_half(model.graph):
        wanted["reduce"] = "float32"
    elif not context.gradient_fp32_sync and given.get("reduce") is None and model.dtype in HALVES:
        wanted["reduce"] = model.dtype
    arguments = dict(given)
    for name, value in wanted.items():
        if name == "pins":
            arguments["pins"] = _joined(given.get("pins", ()), value)
        elif given.get(name) in (None, value) or name == "search":
            arguments[name] = value
        else:
            raise UsageError(_FIXED.format(name=name, value=given[name], wanted=value))
    return arguments


def _joined(pins: Any, restriction: Restriction) -> Restriction:
    """The context's restriction joined with the given pins."""
    if not pins:
        return restriction
    own = pins if callable(pins) else Pins(operators=dict(map(parse_pin, pins)))
    return together(own, restriction)


def _is_half(graph: Graph) -> bool:
    return any(tensor.dtype in HALVES for tensor in graph.parameters if tensor.trainable)


def _require_marks(context: Context, model: LoadedModel) -> None:
    """Marks must mean something in the mode."""
    own = own_parameters(model.given)
    if context.mode == "hybrid_parallel" and not own:
        raise UsageError(
            "hybrid_parallel needs parameters of which every rank has its own: mark them with "
            "autopar.layerwise_parallel(parameter), "
            "or take data_parallel"
        )
    if own and context.mode != "hybrid_parallel":
        raise UsageError(
            f"layerwise_parallel parameters ({', '.join(own[:5])}) are for the mode "
            f"hybrid_parallel, not {context.mode}"
        )
    cut = [path for path, _ in marked(model.given, "autopar_cuts")]
    if cut and not context.cut_by_operator:
        raise UsageError(
            f"shard of {', '.join(map(repr, cut[:5]))} is for semi_auto_parallel and "
            f"auto_parallel, not {context.mode}"
        )


def _of_mode(context: Context, model: LoadedModel) -> dict[str, Any]:
    devices = context.devices
    if context.mode == "stand_alone":
        return {"devices": 1}
    wanted: dict[str, Any] = {
        "devices": devices,
        "stages": context.pipeline_stages,
        "reductions": reductions_of(context, model),
    }
    if context.pipeline_stages > 1 and devices % context.pipeline_stages:
        raise UsageError(
            f"pipeline_stages={context.pipeline_stages} does not divide the {devices} devices"
        )
    if context.cut_by_operator:
        return wanted | _cut_operators(context, model)
    wanted["search"] = "dynamic_programming"
    return wanted | _data_parallel(context, devices, batch_of(model.graph))


def _cut_operators(context: Context, model: LoadedModel) -> dict[str, Any]:
    """The arguments of the modes in which operators are cut."""
    wanted: dict[str, Any] = {"search": context.method, "fewer": False}
    rest = "data" if context.mode == "semi_auto_parallel" else None
    cuts = cuts_of(model)
    stored = {}
    if path := context.strategy_ckpt_load_file:
        if is_plan(path):
            # The operators of the plan keep their cuts; the search decides the rest.
            wanted["reuse_from"] = path
            rest = None
        else:
            loaded = loaded_strategies(path, model.graph)
            cuts = {**loaded.cuts, **cuts}
            stored = dict(loaded.parts)
    if context.auto_parallel_search_mode == "sharding_propagation" and not cuts:
        raise UsageError(
            "sharding_propagation goes on from operators that are cut: cut some with "
            "autopar.shard(module, ((4, 1), (1, 1)))"
        )
    divided = bool(context.enable_parallel_optimizer)
    size = context.optimizer_weight_shard_size
    wanted["zero"] = 1 if divided else 0
    wanted["pins"] = CutOperators(
        cuts=cuts,
        devices=context.devices // context.pipeline_stages,
        batch=batch_of(model.graph),
        stored=stored,
        rest=rest,
        divided=divided,
        parts=size if size > 0 else None,
    )
    return wanted


def _data_parallel(context: Context, devices: int, batch: int) -> dict[str, Any]:
    """One axis, or two where weights are updated in parts by groups of devices."""
    size = context.optimizer_weight_shard_size
    if not context.enable_parallel_optimizer:
        return {"scheme": "data", "mesh": (devices,), "zero": 0}
    whole = size in (-1, devices)
    if not whole and devices % size:
        raise UsageError(
            f"optimizer_weight_shard_size={size} does not divide the {devices} devices"
        )
    # The scheme zero1 would leave norms and biases stored as is best; here all parameters are in
    # parts.
    inside = CutOperators(
        cuts={},
        devices=devices,
        batch=batch,
        rest="data",
        divided=True,
        parts=None if whole else size,
    )
    return {
        "mesh": (devices,) if whole else (devices // size, size),
        "zero": 1,
        "pins": inside,
        "fewer": False,
    }


def reductions_of(context: Context, model: LoadedModel) -> Reductions:
    """The reduction of gradients."""
    own_loss = not context.cut_by_operator and is_mean(model.graph)
    return Reductions(
        fused=_fused(model),
        cuts=context.all_reduce_fusion_config,
        local=own_parameters(model.given),
        weight=float(context.devices) if own_loss else 1.0,
        mean=context.gradients_mean,
    )


def require_own(plan: Plan, graph: Graph) -> None:
    """Refuse a plan that brings home a gradient of which every rank is to keep its own."""
    own = set(plan.schedule.reductions.local)
    if not own:
        return
    for chunk in plan.execution(analyse(graph, train=plan.model.mode == "train")).chunks:
        for step in chunk.whole.program.steps:
            if (
                isinstance(step, Redistribute)
                and step.tensor in own
                and chain_collectives(graph, step, chunk.mesh.shape)[1]
            ):
                used = (
                    f"{step.tensor!r} is used in several ways whose gradients meet among the ranks"
                )
                raise UsageError(
                    f"{used}, so no rank can have its own; the nearest is a parameter for each use"
                )


def _fused(model: LoadedModel) -> tuple[tuple[str, ...], ...]:
    """The sets of parameters whose gradients are reduced together, by marks of modules.

    If a marked module lies inside another one, the inner mark counts.
    """
    marks = {
        path: module_marks["fusion"]
        for path, module_marks in marked(model.given, ATTRIBUTES)
        if "fusion" in module_marks
    }
    sets: dict[object, list[str]] = {}
    for tensor in model.graph.parameters:
        path = next(
            (
                p
                for p in sorted(marks, key=len, reverse=True)
                if not p or tensor.name.startswith(f"{p}.")
            ),
            None,
        )
        if path is not None and tensor.trainable:
            sets.setdefault(marks[path] or (0, tensor.name), []).append(tensor.name)
    return tuple(map(tuple, sets.values()))


_LINEAR = (
    "add",
    "sub",
    "mul",
    "div",
    "neg",
    "view",
    "reshape",
    "squeeze",
    "to",
    "_to_copy",
    "clone",
)


def is_mean(graph: Graph) -> bool:
    """Whether a loss is a mean over the batch, not a sum.

    The reductions in the loss tell; without any it is taken for a mean.
    """
    made = {name: op for op in graph.operators for name in op.outputs}
    seen = set()
    waiting = [graph.loss]
    while waiting:
        operator = made.get(str(waiting.pop()))
        if operator is None or operator.name in seen:
            continue
        seen.add(operator.name)
        kind = operator.kind.split(".")[1]
        if kind in _LINEAR and not operator.name.endswith(".mean"):
            waiting += operator.inputs
        else:
            return (
                kind not in ("sum", "ReduceSum") and operator.attributes.get("reduction") != _SUMMED
            )
    return True


_SUMMED = 2
"""Torch's number of the reduction "sum" of a loss function."""
