"""The Python interface: `autopar.plan`, `autopar.parallelize`; the command line is a thin face of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.costmodel import Cluster, default_cluster, load_cluster, parse_span, presets
from autopar.search import NoAssignment

from .compressing import compressed
from .configured import load_any, sizes_of_plan
from .context import current
from .context.applied import in_context, require_own
from .context.files import save_strategies
from .errors import PlanError, UsageError, unknown
from .frontends.load import ONNX_ENDINGS, ModelOptions, load_model
from .ir.dtype import FLOATS
from .model import LoadedModel
from .operators import bring_rules, provide_rules
from .pins import Pins, Restriction, parse_pin, replicated, reuse, together
from .plan import Plan
from .plan_checks import require_consistent
from .planner import Progress, search_plan
from .planning.candidates import meshes
from .planning.request import Request
from .report.given import checked
from .schemes import scheme_named
from .schemes.pinning import pinned, stage_mesh
from .sharding.analysis import Analysis, analyse
from .sharding.mesh import Mesh
from .sharding.schedule import PLAINLY, Reductions, Types
from .tables import Limits

if TYPE_CHECKING:
    import torch

    from autopar.runtime.module import ParallelModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it was made from, and sentences worth telling the user."""

    plan: Plan
    model: LoadedModel
    cluster: Cluster
    notes: tuple[str, ...]


def choose_cluster(cluster: str | Path | Cluster | None, devices: int | None) -> tuple[Cluster, str]:
    """The cluster to plan for, sized to `devices`, and a sentence that says which one is assumed."""
    if devices is not None and devices < 1:
        raise UsageError(f"--devices is {devices}; it must be at least 1")
    if cluster is None:
        found, sentence = default_cluster()
    else:
        found = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
        sentence = f"cluster {found.name}"
    return (found.sized(devices) if devices is not None else found), sentence


def plan(
    model: Any,
    example_inputs: Any = None,
    *,
    devices: int | None = None,
    cluster: str | Path | Cluster | None = None,
    mode: str = "train",
    batch: int | None = None,
    dims: Mapping[str, int] | None = None,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtype: str | None = None,
    master: str | None = None,
    reduce: str | None = None,
    frozen: Sequence[str] = (),
    trained: Sequence[str] = (),
    optimizer: str = "adamw",
    search: str = "dynamic_programming",
    memory: float | str | None = None,
    pins: Sequence[str] | Pins = (),
    scheme: str | None = None,
    mesh: Mesh | Sequence[int] | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    recompute: str | None = None,
    zero: int | None = None,
    offload: str | None = None,
    schedule: str | None = None,
    interleave: int | None = None,
    load: str | Path | Plan | None = None,
    reuse_from: str | Path | Plan | None = None,
    loss: str | Callable[..., Any] | None = None,
    discover: bool = False,
    replicate_unknown: bool = False,
    trust: bool = False,
    compress: Mapping[str, str] | float | None = None,
    progress: Progress | None = None,
) -> Plan:
    """Find the cheapest way to run `model` on `devices` devices of `cluster`.

    `model`: a path (`.onnx`, `.pt2`), `package.module:function`, `hf:path/config.json`, an `onnx.ModelProto`, or a `torch.nn.Module` with
    `example_inputs` (a tuple, or a dict of keyword arguments). `dtype`: the floating-point type of the computation (None: the model's).
    `master`: in which trained parameters are stored and updated, by default float32 beside a 16-bit `dtype`, else the type in which they
    are used. `reduce`: in which their gradients are added up and travel, by default as `master`. `frozen`, `trained`: names or patterns of
    an ONNX file's stored floats that are constants, or parameters, whatever they look like. `memory`: bytes per device, or a
    text with a unit ("80GiB"). `pins`: texts
    such as `"OP=AXIS:FACTOR"`. `scheme`: a known scheme (`autopar.schemes`). `mesh`: of a stage. `stages`, `micro_batches`, `recompute`
    ("none", "selective", "full"), `zero` (0 to 3), `offload` ("none"; "optimizer": its state in host memory), `schedule` of the pipeline
    and its `interleave` are searched unless they are given. `load`: a strategy checkpoint of this very model, used as it is;
    `reuse_from`: one of which the matching part is kept. Of operators without a rule, `discover` finds one by executing them on small
    shards, and `replicate_unknown` has every device compute all of what is left. `trust`: whether a `.pt2` file may execute code that it
    holds.
    `compress`: formats of gradients by parameter name or pattern, the last that fits counting: "float32", "bfloat16", "float16", or
    low-rank factors as "powersgd-4" (`autopar.sharding.gradient_formats`); or a number, the relative error of the gradients within which
    the formats are chosen that save most time. It needs gradients that are summed whole (ZeRO 0).
    Where keys of the auto-parallel context are set, they say what is not said here.
    Raises the errors of `autopar.errors`.
    """
    given: dict[str, Any] = {
        "devices": devices, "cluster": cluster, "mode": mode, "optimizer": optimizer, "search": search, "memory": memory, "pins": pins,
        "scheme": scheme, "mesh": mesh, "stages": stages, "micro_batches": micro_batches, "recompute": recompute, "zero": zero,
        "offload": offload, "schedule": schedule, "interleave": interleave, "load": load, "reuse_from": reuse_from, "discover": discover,
        "replicate_unknown": replicate_unknown, "progress": progress, "master": master, "reduce": reduce,
    }  # fmt: skip
    given = checked({**given, "batch": batch})
    options = ModelOptions(
        dims=dims or {}, shapes=shapes or {}, batch=given.pop("batch"), dtype=dtype, loss=loss, train=_is_training(mode), frozen=frozen,
        trained=trained, trust=trust,
    )  # fmt: skip
    loaded = load_any(model, options, example_inputs)
    if current().active:
        given = in_context(current(), loaded, given)
    found = plan_loaded(loaded, **given)
    require_own(found.plan, found.model.graph)
    if compress is not None:
        found = plan_loaded(loaded, **compressed(found.plan, found.model, found.cluster, given, compress))
    if path := current().strategy_ckpt_save_file:
        save_strategies(found.plan, found.model.graph, path)
    return found.plan


def _is_training(mode: str) -> bool:
    if mode not in ("train", "infer"):
        raise UsageError(f"mode {mode!r} is none of train, infer")
    return mode == "train"


def plan_loaded(
    model: LoadedModel,
    *,
    devices: int | None = None,
    cluster: str | Path | Cluster | None = None,
    mode: str = "train",
    master: str | None = None,
    reduce: str | None = None,
    optimizer: str = "adamw",
    search: str = "dynamic_programming",
    memory: float | None = None,
    pins: Sequence[str] | Pins | Restriction = (),
    scheme: str | None = None,
    mesh: Mesh | Sequence[int] | None = None,
    stages: int | None = None,
    micro_batches: int | None = None,
    recompute: str | None = None,
    zero: int | None = None,
    offload: str | None = None,
    schedule: str | None = None,
    interleave: int | None = None,
    load: str | Path | Plan | None = None,
    reuse_from: str | Path | Plan | None = None,
    discover: bool = False,
    replicate_unknown: bool = False,
    progress: Progress | None = None,
    reductions: Reductions = PLAINLY,
    fewer: bool = True,
) -> Planned:
    """`plan` for a model that is loaded already, with notes. `pins` may be any restriction; `fewer`: whether devices may be left idle."""
    chosen, sentence = choose_cluster(cluster, devices)
    notes = [sentence, *model.notes]
    if load is not None:
        old = load if isinstance(load, Plan) else Plan.load(load)
        model = bring_rules(model, old)
        _require_loaded(old, model, chosen, devices, cluster)
        used = cluster_of_plan(old, cluster)
        return Planned(plan=old, model=model, cluster=used, notes=(f"the plan is loaded, for cluster {used.name}", *model.notes))
    train = _is_training(mode)
    model, said = provide_rules(model, discover=discover, replicate_unknown=replicate_unknown)
    notes += said
    restrictions: list[Restriction] = [replicated] if model.graph.replicated else []
    named = scheme_named(scheme) if scheme is not None else None
    fixed = mesh if mesh is None or isinstance(mesh, Mesh) else stage_mesh(chosen, [int(size) for size in mesh], stages or 1)
    if callable(pins) and not isinstance(pins, Pins):
        restrictions.append(pins)
    elif pins:
        wanted = pins if isinstance(pins, Pins) else Pins(operators=dict(map(parse_pin, pins)))
        restrictions.append(_where_axes_exist(wanted, [fixed] if fixed else meshes(chosen)))
    if reuse_from is not None:
        old = reuse_from if isinstance(reuse_from, Plan) else Plan.load(reuse_from)
        require_consistent(old)
        if old.devices != chosen.devices:
            raise PlanError(f"the plan to reuse is for {old.devices} devices, not {chosen.devices}")
        found, kept = reuse(old, analyse(model.graph, train=train))
        fixed = old.mesh_
        restrictions.append(found)
        notes.append(f"kept {kept} of the {len(old.operators)} strategies of the loaded plan")
    request = Request(
        cluster=chosen, train=train, optimizer=optimizer if train else "none", method=search, memory=memory, mesh=fixed,
        limits=together(*restrictions) if restrictions else None, stages=stages, micro_batches=micro_batches, recompute=recompute,
        zero=zero, offload=offload, pipeline=schedule, interleave=interleave, uniform=not pins and reuse_from is None,
        types=types_of(model, master, reduce, train=train), reductions=reductions if train else PLAINLY, fewer=fewer,
    )  # fmt: skip
    if named is not None:
        request = pinned(request, named, analyse(model.graph, train=train))
    best = search_plan(model.graph, request, progress=progress)
    best = best.model_copy(update={"model": best.model.model_copy(update={"dtype": model.dtype})})
    return Planned(plan=best, model=model, cluster=chosen, notes=tuple(notes))


def types_of(model: LoadedModel, master: str | None, reduce: str | None, *, train: bool) -> Types:
    """The types of stored parameters and of gradients that are asked for, or usual beside the `dtype` that was."""
    found = Types.of(master, reduce, dtype=model.dtype if train else None)
    found.require(model.graph)
    return found.within(model.graph)


def _where_axes_exist(pins: Pins, candidates: Sequence[Mesh]) -> Restriction:
    """The pins on the meshes that have all axes they name; an axis that no candidate has is an error."""
    named = {axis for wanted in pins.operators.values() for axis in wanted}
    offered = dict.fromkeys(axis.name for mesh in candidates for axis in mesh.axes)
    for axis in sorted(named - set(offered)):
        raise UsageError(unknown("mesh axis", axis, offered))

    def restriction(analysis: Analysis, mesh: Mesh) -> Limits:
        if not named <= {axis.name for axis in mesh.axes}:
            raise NoAssignment
        return pins(analysis, mesh)

    return restriction


def _require_loaded(old: Plan, model: LoadedModel, cluster: Cluster, devices: int | None, named: object) -> None:
    """A strategy checkpoint used as it is must be for this model and these devices."""
    if (devices is not None or named is not None) and cluster.devices not in (old.devices, old.devices + old.unused):
        raise PlanError(f"the plan is for {old.devices} devices, not {cluster.devices}")
    old.require_match(model.graph)
    old.program(analyse(model.graph, train=old.model.mode == "train"))


def cluster_of_plan(plan: Plan, cluster: str | Path | Cluster | None = None) -> Cluster:
    """The cluster that a plan was made for, or `cluster` in its place, sized to the plan's devices; it must have the mesh's levels."""
    if cluster is None and plan.cluster not in presets():
        raise UsageError(f"the plan's cluster {plan.cluster!r} is no preset: give its file with --cluster")
    found = cluster if isinstance(cluster, Cluster) else load_cluster(cluster or plan.cluster)
    sized = found.sized(plan.devices)
    for axis in plan.mesh:
        if axis.level != "device":
            parse_span(sized, axis.level, axis.size)
    return sized


def model_of_plan(
    model: Any, plan: Plan, example_inputs: Any = None, *, loss: str | Callable[..., Any] | None = None, trust: bool = False
) -> LoadedModel:
    """Load the model that a plan is for, with the plan's input sizes and dtype, and require that it matches."""
    options = ModelOptions(train=plan.model.mode == "train", loss=loss, trust=trust)
    if isinstance(model, LoadedModel):
        loaded = model
    elif hasattr(model, "named_parameters"):
        given = example_inputs if example_inputs is not None else _example_inputs(plan, model)
        batch = None if example_inputs is None else _batch_of(plan)
        loaded = load_model(model, replace(options, batch=batch, dtype=_cast_of(plan, model)), given)
    elif _is_onnx(model):
        loaded = _onnx_of_plan(model, plan, options)
    else:
        fixed = str(model).endswith(".pt2")
        sized = options if fixed else replace(options, batch=_batch_of(plan), dtype=plan.model.dtype)
        loaded = load_any(model, sizes_of_plan(model, plan, sized), example_inputs)
    plan.require_match(loaded.graph)
    return bring_rules(loaded, plan)


def _onnx_of_plan(model: Any, plan: Plan, options: ModelOptions, batch: int | None = None) -> LoadedModel:
    """The ONNX model with the plan's input shapes (of another `batch`); a file of another fixed batch is given it."""
    options = replace(options, dtype=plan.model.dtype, parameters=set(plan.parameters))
    old = _batch_of(plan)
    shapes = {name: spec.shape for name, spec in plan.model.inputs.items()}
    if batch is not None:
        shapes = {name: (batch, *shape[1:]) if shape and shape[0] == old else shape for name, shape in shapes.items()}
    try:
        return load_model(model, replace(options, shapes=shapes))
    except UsageError:
        if old is None:
            raise
        return load_model(model, replace(options, batch=batch or old))


def model_of_batch(model: str | Path, plan: Plan, batch: int, *, loss: str | None = None, trust: bool = False) -> LoadedModel:
    """The model of a plan with another global batch; a `UsageError` where it cannot have it."""
    options = ModelOptions(train=plan.model.mode == "train", loss=loss, dtype=plan.model.dtype, trust=trust)
    loaded = _onnx_of_plan(model, plan, options, batch) if _is_onnx(model) else load_model(model, replace(options, batch=batch))
    return bring_rules(loaded, plan)


def _is_onnx(model: Any) -> bool:
    return type(model).__name__ == "ModelProto" or (isinstance(model, (str, Path)) and str(model).endswith(ONNX_ENDINGS))


def _example_inputs(plan: Plan, module: Any) -> Any:
    """Zeros of the planned shapes, by name where all names are arguments of the module, else as positional arguments."""
    import torch

    zeros = {name: torch.zeros(spec.shape, dtype=getattr(torch, spec.dtype)) for name, spec in plan.model.inputs.items()}
    return zeros if set(zeros) <= set(inspect.signature(module.forward).parameters) else tuple(zeros.values())


def _batch_of(plan: Plan) -> int | None:
    sizes = [spec.shape[0] for spec in plan.model.inputs.values() if spec.shape]
    return sizes[0] if sizes else None


def _cast_of(plan: Plan, module: Any) -> str | None:
    """The floating-point type that a module was planned in, where it has another: it is run in a copy of that type."""
    own = {str(value.dtype).removeprefix("torch.") for value in module.parameters() if value.is_floating_point()}
    if plan.model.dtype is not None:
        return plan.model.dtype if own != {plan.model.dtype} else None
    planned = {p.dtype for p in plan.parameters.values() if p.dtype in FLOATS}
    return planned.pop() if len(own) == len(planned) == 1 and planned != own else None


def parallelize(
    model: Any,
    plan: Plan | str | Path,
    example_inputs: Any = None,
    *,
    loss: str | Callable[..., Any] | None = None,
    backend: str | None = None,
    outputs: Literal["whole", "split"] | None = None,
    trust: bool = False,
    exact_random: bool = False,
    debug: bool = False,
    weights: str | Path | None = None,
) -> ParallelModule:
    """The model as an `nn.Module` that runs the plan on this rank; call it on every rank of an initialised process group.

    Without a process group, one is initialised from the environment of `torchrun`. Parameters are DTensors, the
    arithmetic is local. `example_inputs` and `loss`: as they were given to `plan`; example inputs may be left out where all
    arguments of the model are tensors. `outputs`: "whole" gives plain tensors, whole on every rank, "split" gives DTensors where the
    plan leaves them split; by default they are whole, except beside a loss that the plan has of its own. `trust`: as for
    `plan`. Random numbers are counted: dropout draws the same on any plan and any number of ranks; with `exact_random` it draws from
    torch's own generator what one device would draw. The ranks' batches are compared in the first steps, with `debug` in all.

    `weights`: a `.safetensors` file or a Hugging Face folder of such files. Each rank reads the slices that its shards need, in the
    planned types; the model may then be on the meta device.

    Of the auto-parallel context, where it is set, `full_batch` and `parameter_broadcast` count: without `full_batch` each rank is given its
    part of the batch.

    A plan that does not fit the model or the world is refused on every rank, with the reason.
    """
    from autopar.runtime.parallelize import parallelize as build

    def prepare() -> tuple[LoadedModel, Plan]:
        found = plan if isinstance(plan, Plan) else Plan.load(plan)
        return model_of_plan(model, found, example_inputs, loss=loss, trust=trust), found

    context = current()
    if context.active:
        context.require()
    parts, broadcast = context.active and context.mode != "stand_alone" and not context.full_batch, context.parameter_broadcast
    return build(
        prepare, backend=backend, outputs=outputs, exact_random=exact_random, debug=debug, weights=weights, parts=parts, broadcast=broadcast
    )


def host_states(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
    """`optimizer` over the parameters of a module of `parallelize`, with its state in host memory where the plan has it there.

    Training without this call is the same, with all of the state on the device.
    """
    from autopar.runtime.host_states import host_states as place

    return place(optimizer, module)


def local_optimizer(kind: Callable[..., torch.optim.Optimizer], parameters: Any, **options: Any) -> torch.optim.Optimizer:
    """`kind(parameters, **options)` for a module of `parallelize`: the same updates, made on this rank's shards as plain tensors.

    So every optimizer of torch runs, fused or not, and several times as fast as on DTensors, which parameters and state are all the same.
    `parameters`: the module, or its parameters or groups of them. An update that looks at more than one element at a time (Adafactor,
    LAMB) is made on DTensors; what their arithmetic cannot do is a `RunError`.
    """
    from autopar.runtime.optimizers import local_optimizer as make

    return make(kind, parameters, **options)


def parameters_on_meta() -> AbstractContextManager[None]:
    """Inside, PyTorch modules are made with their parameters on the meta device, whatever their size, and with buffers as ever.

    Such a module can be planned; to run it, give `parallelize` its `weights`.
    """
    from autopar.runtime.weights import parameters_on_meta as context

    return context()
