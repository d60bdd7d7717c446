"""The Python interface: `autopar.plan`, `autopar.parallelize`; the command line is a thin face of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from autopar.costmodel import Cluster

from .configured import load_any
from .errors import PlanError
from .frontends.load import ModelOptions
from .model import LoadedModel
from .operators import bring_rules, provide_rules
from .plan import Plan
from .plan_options import PlanOptions, choose_cluster, is_training
from .plan_origin import cluster_of_plan, model_of_plan
from .planning.pins import Pins
from .planning.planner import folded_of, search_plan
from .planning.ranking import Progress
from .report.given import checked
from .sharding.analysis import Analysis, analyse
from .sharding.mesh import Mesh

if TYPE_CHECKING:
    import torch

    from autopar.runtime.module import ParallelModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it was made from, sentences worth telling the user, and the CPU seconds of the search.

    `analysis`: of the model's graph, where the search made one.
    """

    plan: Plan
    model: LoadedModel
    cluster: Cluster
    notes: tuple[str, ...]
    seconds: float = 0.0
    analysis: Analysis | None = None


def plan(
    model: Any, example_inputs: Any = None, *, devices: int | None = None, cluster: str | Path | Cluster | None = None, mode: str = "train",
    batch: int | None = None, dims: Mapping[str, int] | None = None, shapes: Mapping[str, tuple[int, ...]] | None = None,
    dtype: str | None = None, master: str | None = None, reduce: str | None = None, frozen: Sequence[str] = (), trained: Sequence[str] = (),
    optimizer: str = "adamw", search: str = "dynamic_programming", memory: float | str | None = None, pins: Sequence[str] | Pins = (),
    scheme: str | None = None, mesh: Mesh | Sequence[int] | None = None, stages: int | None = None, micro_batches: int | None = None,
    recompute: str | None = None, zero: int | None = None, offload: str | None = None, schedule: str | None = None,
    interleave: int | None = None, load: str | Path | Plan | None = None, reuse_from: str | Path | Plan | None = None,
    loss: str | Callable[..., Any] | None = None, discover: bool = False, replicate_unknown: bool = False, trust: bool = False,
    compress: Mapping[str, str] | float | None = None, progress: Progress | None = None,
) -> Plan:  # fmt: skip
    """Find the cheapest way to run `model` on `devices` devices of `cluster`.

    `model`: a path (`.onnx`, `.pt2`), `package.module:function`, `hf:path/config.json`, an `onnx.ModelProto`, or a `torch.nn.Module` with
    `example_inputs` (a tuple, or a dict of keyword arguments). `dtype`: the floating-point type of the computation (None: the model's).
    `master`: in which trained parameters are stored and updated, by default float32 beside a 16-bit `dtype`, else the type in which they
    are used. `reduce`: in which their gradients are added up and travel, by default as `master`. `frozen`, `trained`: names or patterns of
    an ONNX file's stored floats that are constants, or parameters, whatever they look like. `memory`: bytes per device, or a
    text with a unit ("80GiB"). `pins`: texts such as `"OP=AXIS:FACTOR"`. `scheme`: a known scheme (`autopar.schemes`). `mesh`: of a stage.
    `stages`, `micro_batches`, `recompute` ("none", "selective", "full"), `zero` (0 to 3), `offload` ("none"; "optimizer": its state in host
    memory), `schedule` of the pipeline and its `interleave` are searched unless given. `load`: a strategy checkpoint of this very model;
    `reuse_from`: one of which the matching part is kept. Of operators without a rule, `discover` finds one by executing them on small
    shards, and `replicate_unknown` has every device compute all of what is left. `trust`: whether a `.pt2` file may execute code that it
    holds. `compress`: formats of gradients by parameter name or pattern, the last that fits counting: "float32", "bfloat16", "float16", or
    low-rank factors as "powersgd-4" (`autopar.sharding.gradient_formats`); or a number, the relative error of the gradients within which
    the formats are chosen that save most time. It needs gradients that are summed whole (ZeRO 0).
    Where keys of the auto-parallel context are set, they say what is not said here. Raises the errors of `autopar.errors`.
    """
    given = checked({
        "devices": devices, "cluster": cluster, "mode": mode, "optimizer": optimizer, "search": search, "memory": memory, "pins": pins,
        "scheme": scheme, "mesh": mesh, "stages": stages, "micro_batches": micro_batches, "recompute": recompute, "zero": zero,
        "offload": offload, "schedule": schedule, "interleave": interleave, "load": load, "reuse_from": reuse_from, "discover": discover,
        "replicate_unknown": replicate_unknown, "progress": progress, "master": master, "reduce": reduce, "batch": batch,
    })  # fmt: skip
    options = ModelOptions(
        dims=dims or {}, shapes=shapes or {}, batch=given.pop("batch"), dtype=dtype, loss=loss, train=is_training(mode), frozen=frozen,
        trained=trained, trust=trust,
    )  # fmt: skip
    return _in_context(load_any(model, options, example_inputs), given, compress)


def _in_context(loaded: LoadedModel, given: dict[str, Any], compress: Mapping[str, str] | float | None) -> Plan:
    """The plan of a loaded model, with what the auto-parallel context says beside the arguments."""
    from .compressing import compressed
    from .context import current
    from .context.applied import in_context, require_own
    from .context.files import save_strategies
    from .context.imported import with_parts_gathered

    kept = given.get("load") is not None
    if current().active:
        given = in_context(current(), loaded, given)
    found = plan_loaded(loaded, **given)
    require_own(found.plan, found.model.graph)
    if compress is not None:
        found = plan_loaded(loaded, **compressed(found.plan, found.model, found.cluster, given, compress))
    if current().in_parts and not kept:
        found = replace(found, plan=with_parts_gathered(found.plan, found.model.graph, found.cluster))
    if path := current().strategy_ckpt_save_file:
        save_strategies(found.plan, found.model.graph, path)
    return found.plan


def plan_loaded(model: LoadedModel, *, progress: Progress | None = None, **asked: Any) -> Planned:
    """`plan` for a model that is loaded already, with notes; `asked`: as of `PlanOptions`."""
    wanted = PlanOptions(**asked)
    cluster, sentence = choose_cluster(wanted.cluster, wanted.devices)
    if wanted.load is not None:
        return _loaded(model, wanted, cluster)
    is_training(wanted.mode)
    ruled, said = provide_rules(model, discover=wanted.discover, replicate_unknown=wanted.replicate_unknown)
    request, kept = wanted.request(ruled, cluster)
    before = time.process_time()
    folded = folded_of(ruled.graph, request)
    best = search_plan(ruled.graph, request, progress=progress, folded=folded)
    seconds, analysis = time.process_time() - before, folded.analysis(short=False)
    best = best.model_copy(update={"model": best.model.model_copy(update={"dtype": ruled.dtype})})
    notes = (sentence, *model.notes, *said, *kept)
    return Planned(plan=best, model=ruled, cluster=cluster, notes=notes, seconds=seconds, analysis=analysis)


def _loaded(model: LoadedModel, wanted: PlanOptions, cluster: Cluster) -> Planned:
    """A strategy checkpoint used as it is: it must be for this model and these devices."""
    assert wanted.load is not None
    old = wanted.load if isinstance(wanted.load, Plan) else Plan.load(wanted.load)
    ruled = bring_rules(model, old)
    if (wanted.devices is not None or wanted.cluster is not None) and cluster.devices not in (old.devices, old.devices + old.unused):
        raise PlanError(f"the plan is for {old.devices} devices, not {cluster.devices}")
    old.require_match(ruled.graph)
    old.program(analyse(ruled.graph, train=old.model.mode == "train"))
    used = cluster_of_plan(old, wanted.cluster)
    return Planned(plan=old, model=ruled, cluster=used, notes=(f"the plan is loaded, for cluster {used.name}", *ruled.notes))


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

    from .context import current

    def prepare() -> tuple[LoadedModel, Plan]:
        found = plan if isinstance(plan, Plan) else Plan.load(plan)
        return model_of_plan(model, found, example_inputs, loss=loss, trust=trust), found

    context = current()
    if context.active:
        context.require()
    return build(
        prepare, backend=backend, outputs=outputs, exact_random=exact_random, debug=debug, weights=weights, parts=context.in_parts,
        broadcast=context.parameter_broadcast,
    )  # fmt: skip


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
