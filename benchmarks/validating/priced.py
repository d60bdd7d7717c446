"""A published run as a plan: the ordinary graph of its shape, pinned as the run was configured.

Its price is that of the plan, whatever memory it needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from autopar.api import plan_loaded
from autopar.costmodel import Cluster
from autopar.costmodel.device.narrow_kernels import recipes_of
from autopar.costmodel.frameworks import LOSSES, Framework
from autopar.costmodel.frameworks.kernels import LIBRARY, TF32, Kernels
from autopar.integrations.importing.configuration import Configuration as Imported
from autopar.integrations.importing.configuration_plan import cuts_between, scheme_text
from autopar.integrations.importing.megatron_framework import schedule_of
from autopar.ir import Graph, Role
from autopar.ir.recipes import PLAIN, RECIPES, with_precision
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.planning.model.recompute import MODULES, modules_of
from autopar.planning.model.request import WITHOUT_LIMIT
from autopar.raising import ROWS, attention, raised
from benchmarks.validating.known import Shape
from benchmarks.validating.known.graph_builder import SCORES
from benchmarks.validating.known.transformer import transformer

from .configuration import Configuration
from .layer_distribution import layers_of_chunks

AS_SPELLED = tuple(row for row in ROWS if row is not attention)
"""The rows for shapes: attention is in one kernel where the run's was."""

NAMES: Mapping[str, str] = {
    ".attention.q_norm": ".attention.q_a_layernorm",
    ".attention.query": ".attention.q_b_proj",
    ".attention.kv_norm": ".attention.kv_a_layernorm",
    ".attention.kv_up": ".attention.kv_b_proj",
    ".attention.core.": ".attention.core_",
    ".experts.shared": ".mlp.shared_experts",
    ".experts": ".mlp.experts",
}
"""Modules by their names in graphs of shapes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """Predicted seconds of a step, and bytes of the fullest device.

    `forward`, `backward`: seconds of a micro-batch by stage. `allocated`: bytes of tensors at the
    peak, of a device of each stage. `reserved`: bytes of the context and the libraries beside them.
    """

    step: float
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    allocated: tuple[float, ...]
    reserved: float
    fits: bool

    @property
    def memory(self) -> float:
        """Bytes of the fullest device, with context and libraries."""
        return max(self.allocated) + self.reserved


def price(shape: Shape, c: Configuration, cluster: Cluster, name: str = "") -> Priced:
    """Predict a step of a configuration on the cluster, cut or grown to its devices.

    `name`: of the framework. Raises as `autopar.plan` does.
    """
    plan = plan_of_run(shape, c, cluster, name)
    predicted = plan.predicted
    device = cluster.device
    stages = [plan.stages[number :: c.pipeline] for number in range(c.pipeline)]
    if c.pipeline > 1:
        forward = tuple(math.fsum(chunk.forward for chunk in own) for own in stages)
        backward = tuple(math.fsum(chunk.backward for chunk in own) for own in stages)
        allocated = tuple(math.fsum(chunk.memory for chunk in own) for own in stages)
    else:
        passes = (predicted.step - predicted.update) / c.micro_batches
        ahead = predicted.forward / c.micro_batches
        back = predicted.backward / c.micro_batches
        # Collectives of values are about as many forward as backward.
        sent = (passes - ahead - back) / 2
        forward = (ahead + sent,)
        backward = (back + sent,)
        allocated = (predicted.memory,)
    return Priced(
        step=predicted.step,
        forward=forward,
        backward=backward,
        allocated=allocated,
        reserved=device.reserved,
        fits=bool(max(allocated) + device.reserved <= device.memory_capacity),
    )


def plan_of_run(shape: Shape, c: Configuration, cluster: Cluster, name: str = "") -> Plan:
    """Return the plan of a run, priced as its framework runs it, whatever memory it needs."""
    model = model_of_run(shape, c, cluster)
    asked: dict[str, Any] = {
        "cluster": cluster_of_run(c, cluster, name),
        "memory": WITHOUT_LIMIT,
        "stages": c.pipeline,
        "micro_batches": c.micro_batches,
        "recompute": _recompute(c, model.graph),
        "offload": "none",
        "overlap_experts": "on" if _merges(c) else "off",
    }
    if scheme := _scheme(c, cluster.levels[0].size):
        asked["scheme"] = scheme
        if c.copies == 1:
            asked["zero"] = c.zero
    if c.interleave > 1:
        asked["interleave"] = c.interleave
    if c.pipeline > 1:
        asked["cuts"] = cuts_between(model.graph, layers_of_chunks(shape, c, model.graph))
    return plan_loaded(model, **asked).plan


def model_of_run(shape: Shape, c: Configuration, cluster: Cluster) -> LoadedModel:
    """The graph of a run's model, with the kernels and the precision of its framework."""
    recipe = _recipe(c.kernels.products, cluster)
    kernels = replace(
        own_kernels(shape, c),
        wide_loss=LOSSES[c.habits.loss].wide,
        products=c.kernels.products if c.kernels.products == TF32 else "",
    )
    spelled = transformer(shape, batch=c.global_batch, dtype=c.dtype, kernels=kernels).graph
    graph = with_precision(_in_modules(raised(spelled, AS_SPELLED)), recipe)
    return LoadedModel(graph=graph, source=graph, dtype=c.dtype, precision=recipe or PLAIN)


def _in_modules(graph: Graph) -> Graph:
    """The graph with operators named by their modules, as those of Hugging Face are."""
    operators = []
    for operator in graph.operators:
        module = operator.name.partition("/")[0]
        for ours, theirs in NAMES.items():
            module = module.replace(ours, theirs)
        # Products and norms are modules, other operators are what a module does itself.
        last = operator.kind.split(".")[1]
        parameters = (graph.tensors[name].role is Role.PARAMETER for name in operator.inputs)
        if not any(parameters):
            module, _, last = module.rpartition(".")
        operators.append(replace(operator, name=f"{module}/{last}" if module else last))
    return replace(graph, operators=tuple(operators))


def cluster_of_run(c: Configuration, cluster: Cluster, name: str) -> Cluster:
    """The devices of a run in the hands of its framework."""
    kernels = replace(c.kernels, dispatcher=c.dispatcher)
    return cluster.sized(c.devices).run_by(Framework(name=name, habits=c.habits, kernels=kernels))


def own_kernels(shape: Shape, c: Configuration) -> Kernels:
    """The kernels of a framework that it has for these sizes."""
    # Megatron-LM checks this and runs separate kernels instead (fused_softmax.py).
    lacking = (
        c.kernels.attention == LIBRARY
        and c.kernels.skips_masked
        and (c.micro_batch * shape.heads // c.tensor) % SCORES
    )
    return replace(c.kernels, attention="unfused") if lacking else c.kernels


def _recipe(products: str, cluster: Cluster) -> str | None:
    """The recipe whose products run on kernels of this type."""
    has = [name for name in recipes_of(cluster.device) if name in RECIPES]
    named = [name for name in RECIPES if RECIPES[name].kernel == products]
    # A device without such kernels is priced by its next wider ones.
    return next((name for name in reversed(named) if name in has), named[0] if named else None)


def _recompute(c: Configuration, graph: Graph) -> str:
    """The mode of recompute, as the framework means it."""
    if c.recompute != "selective":
        return c.recompute
    if c.habits.saves_outputs:
        return "alternate"
    named = [name for name in c.recompute_modules or ["core_attn"] if name in MODULES]
    return ",".join(modules_of(graph, named)) or "none"


def _schedule(c: Configuration) -> str | None:
    """The pipeline's schedule."""
    if _merges(c):
        return schedule_of(c.pipeline, c.interleave, merged=True)
    return c.pipeline_schedule if c.pipeline > 1 else None


def _merges(c: Configuration) -> bool:
    """Whether passes of two micro-batches are merged, so that one's rows travel under the other."""
    return c.overlap_experts and c.micro_batches > 1


def _scheme(c: Configuration, node: int) -> str:
    """The degrees of a run, as `autopar import` reads them in a file; `node`: devices of a node."""
    by_node = {"moe-token-dispatcher-type": "flex"} if c.dispatcher == "node" else {}
    said = Imported(
        source="run",
        data=c.data,
        shards=c.sharing if c.copies > 1 else None,
        zero=c.zero,
        tensor=c.tensor,
        sequence_parallel=c.sequence_parallel,
        context=c.context,
        context_scheme="ulysses" if c.context_by == "heads" else "context",
        expert=c.expert,
        expert_tensor=c.inner,
        stages=c.pipeline,
        schedule=_schedule(c),
        interleave=c.interleave,
        arguments=by_node,
    )
    return scheme_text(said, c.data, node)
