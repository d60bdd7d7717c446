"""The Python interface, of which the command line is a thin face."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from autopar.costmodel import Cluster
from autopar.costmodel.device.narrow_kernels import require_recipe
from autopar.costmodel.frameworks import OWN

from .analysis.import_proofs import proof_of
from .configured import load_any
from .errors import PlanError
from .frontends.load import options_asked
from .model import LoadedModel, checks_by_default
from .operators import bring_rules, provide_rules
from .options.checking import completed
from .options.keywords import PlanKeywords
from .options.plan_options import PlanOptions, is_training
from .options.python_words import python_words
from .options.signature import with_options
from .options.table import READING
from .options.targets import require_said
from .plan import Plan
from .plan_origin import cluster_of_plan, model_of_plan
from .planning.model.folded_model import FoldedModel
from .planning.model.progress import Progress
from .planning.model.request import WITHOUT_LIMIT, default_limit
from .planning.model.routing import read_routing
from .planning.planner import fastest_plan
from .planning.programs.routed_experts import require_routing, routed
from .planning.remembered_plans import Searches
from .sharding.analysis import Analysis, analyse

if TYPE_CHECKING:
    import torch

    from autopar.runtime.module.parallel_module import ParallelModule


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan with what it was made from, and the CPU seconds of its search.

    `notes`: sentences worth telling the user. `folded`: the model as its search saw it (None: there
    was no search).
    """

    plan: Plan
    model: LoadedModel
    cluster: Cluster
    notes: tuple[str, ...]
    seconds: float = 0.0
    folded: FoldedModel | None = None

    @property
    def analysis(self) -> Analysis:
        """The analysis of the model's graph."""
        if self.folded is not None:
            return self.folded.analysis(short=False)
        return analyse(self.model.graph, train=self.plan.model.mode == "train")


@python_words
@with_options
def plan(model: Any, example_inputs: Any = None, **options: Unpack[PlanKeywords]) -> Plan:
    """Find the cheapest way to run `model` on `devices` devices of `cluster`.

    `model`: a path (`.onnx`, `.pt2`), `package.module:function`, `hf:path/config.json`, an
    `onnx.ModelProto`, or a `torch.nn.Module` with `example_inputs` (a tuple, or a dict of keyword
    arguments). Where keys of the auto-parallel context are set, they hold for what is not given
    here. Raises the errors of `autopar.errors`.
    """
    return planned_with(model, example_inputs, options).plan


def planned_with(model: Any, example_inputs: Any, options: Mapping[str, Any]) -> Planned:
    """The plan of `plan`, with the model and the cluster."""
    values = completed(options)
    reading = {name: values.pop(name) for name in READING}
    compress = values.pop("compress")
    read = options_asked(
        **{name: value for name, value in reading.items() if value is not None},
        train=is_training(values["mode"]),
    )
    return _in_context(load_any(model, read, example_inputs), values, compress)


def _in_context(
    loaded: LoadedModel, given: dict[str, Any], compress: Mapping[str, str] | float | None
) -> Planned:
    """The plan of a loaded model, with what the auto-parallel context says beside the arguments."""
    from .integrations.gradient_formats import compressed
    from .integrations.mindspore.context import current
    from .integrations.mindspore.context.applied import in_context, require_own
    from .integrations.mindspore.context.files import save_strategies
    from .integrations.mindspore.context.imported import with_parts_gathered

    is_loaded = given.get("load") is not None
    if current().active:
        given = in_context(current(), loaded, given)
    planned = plan_loaded(loaded, **given)
    require_own(planned.plan, planned.model.graph)
    if compress is not None:
        planned = plan_loaded(
            loaded, **compressed(planned.plan, planned.model, planned.cluster, given, compress)
        )
    if current().in_parts and not is_loaded:
        planned = replace(
            planned, plan=with_parts_gathered(planned.plan, planned.model.graph, planned.cluster)
        )
    if path := current().strategy_ckpt_save_file:
        save_strategies(planned.plan, planned.model.graph, path)
    return planned


def plan_loaded(model: LoadedModel, *, progress: Progress | None = None, **asked: Any) -> Planned:
    """`plan` for a model that is loaded already, with notes; `asked`: as of `PlanOptions`."""
    wanted = PlanOptions(**asked)
    cluster, sentence = wanted.chosen_cluster()
    for pool in cluster.pools:
        require_recipe(pool.device, model.precision)
    if wanted.load is not None:
        return _loaded(model, wanted, cluster)
    is_training(wanted.mode)
    ruled, said = provide_rules(
        model, discover=wanted.discover, replicate_unknown=wanted.replicate_unknown
    )
    proof = proof_of(model)
    routing = read_routing(wanted.routing)
    require_routing(routing, ruled.graph)
    requests, request_notes = wanted.requests(ruled, cluster)
    before = time.process_time()
    request = requests[0]
    searches = Searches(ruled.graph, request)
    best = fastest_plan(requests, partial(searches.plan, progress=progress))
    if request.target != OWN:
        require_said(best, request.target)
    seconds = time.process_time() - before
    folded = searches.folded
    limit = request.memory_limit
    # A plan that is wanted though it fits no device is still told what would fit.
    if limit >= WITHOUT_LIMIT:
        limit = default_limit(cluster)
    under = routed(
        best,
        folded.analysis(short=False, micro_batches=best.schedule.micro_batches),
        cluster,
        routing,
        limit,
    )
    named = best.model.model_copy(
        update={
            "dtype": ruled.dtype,
            "precision": ruled.precision,
            "proof": proof,
            "onnx": ruled.weights is not None,
            "values": ruled.values,
            "outputs": ruled.outputs,
        }
    )
    best = best.model_copy(update={"model": named, "routing": under})
    proved = (proof,) if proof else ()
    notes = (sentence, *searches.notes, *model.notes, *proved, *said, *request_notes)
    return Planned(
        plan=best, model=ruled, cluster=cluster, notes=notes, seconds=seconds, folded=folded
    )


def _loaded(model: LoadedModel, wanted: PlanOptions, cluster: Cluster) -> Planned:
    """A strategy checkpoint used as it is: it must be for this model and these devices."""
    assert wanted.load is not None
    old = Plan.of(wanted.load)
    ruled = bring_rules(model, old)
    if (wanted.devices is not None or wanted.cluster is not None) and cluster.devices not in (
        old.devices,
        old.devices + old.unused,
    ):
        raise PlanError(f"the plan is for {old.devices} devices, not {cluster.devices}")
    old.require_match(ruled.graph)
    old.program(analyse(ruled.graph, train=old.model.mode == "train"))
    used = cluster_of_plan(old, wanted.cluster, wanted.target)
    return Planned(
        plan=old,
        model=ruled,
        cluster=used,
        notes=(f"the plan is loaded, for cluster {used.name}", *ruled.notes),
    )


@python_words
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
    check: bool | None = None,
) -> ParallelModule:
    """The model as an `nn.Module` that runs the plan on this rank.

    Call it on every rank of an initialised process group.

    Without a process group, one is initialised from the environment of `torchrun`. Parameters are
    DTensors, the arithmetic is local. `example_inputs` and `loss`: as they were given to `plan`;
    example inputs may be left out where all arguments of the model are tensors. `outputs`: "whole"
    gives plain tensors, whole on every rank, "split" gives DTensors where the plan leaves them
    split; by default they are whole, except beside a loss that the plan has of its own. `trust`: as
    for `plan`. Random numbers are counted: dropout draws the same on any plan and any number of
    ranks; with `exact_random` it draws from torch's own generator what one device would draw. The
    ranks' batches are compared in the first steps and some later, with `debug` in all and whole.

    `check`: the planned order of a step (micro-batches, stages, ZeRO, reductions) runs once on a
    small drawn batch, and its loss and gradients are compared with those of one undivided pass. By
    default it does, unless the environment has AUTOPAR_CHECKS=off.

    `weights`: a `.safetensors` file or a Hugging Face folder of such files. Each rank reads the
    slices that its shards need, in the planned types; the model may then be on the meta device.

    If the auto-parallel context is set, its `full_batch` and `parameter_broadcast` count: without
    `full_batch` each rank is given its part of the batch.

    A plan that does not fit the model or the world is refused on every rank, with the reason.
    """
    from autopar.runtime.launch import launched_first
    from autopar.runtime.parallelize import parallelize as build

    from .integrations.mindspore.context import current

    def prepare() -> tuple[LoadedModel, Plan]:
        loaded_plan = Plan.of(plan)
        loaded = model_of_plan(model, loaded_plan, example_inputs, loss=loss, trust=trust)
        # The ranks then agree on what went wrong on one of them.
        if launched_first():
            proof_of(loaded, runs=True)
        return loaded, loaded_plan

    context = current()
    if context.active:
        context.require()
    return build(
        prepare,
        backend=backend,
        outputs=outputs,
        exact_random=exact_random,
        debug=debug,
        weights=weights,
        parts=context.in_parts,
        broadcast=context.parameter_broadcast,
        check=checks_by_default() if check is None else check,
    )


def host_states(optimizer: torch.optim.Optimizer, module: torch.nn.Module) -> torch.optim.Optimizer:
    """The optimizer with its state in host memory where the plan has it there.

    It is over the parameters of a module of `parallelize`.

    Training without this call is the same, with all of the state on the device.
    """
    from autopar.runtime.parameters.host_states import host_states as place

    return place(optimizer, module)


def local_optimizer(
    kind: Callable[..., torch.optim.Optimizer], parameters: Any, **options: Any
) -> torch.optim.Optimizer:
    """The optimizer `kind(parameters, **options)` whose updates run on this rank's plain shards.

    It is for a module of `parallelize`.

    So every optimizer of torch runs, fused or not, and several times as fast as on DTensors, which
    parameters and state are all the same. `parameters`: the module, or its parameters or groups of
    them. An update that looks at more than one element at a time (Adafactor, LAMB) is made on
    DTensors; what their arithmetic cannot do is a `RunError`.
    """
    from autopar.runtime.optimizers import local_optimizer as make

    return make(kind, parameters, **options)


def parameters_on_meta() -> AbstractContextManager[None]:
    """A context in which PyTorch modules are made with their parameters on the meta device.

    Parameters may be of any size; buffers are made as ever.

    Such a module can be planned; to run it, give `parallelize` its `weights`.
    """
    from autopar.runtime.files.module_weights import parameters_on_meta as context

    return context()
