"""A published run as a plan: the ordinary graph of its shape, pinned as the run was configured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from autopar.api import plan_loaded
from autopar.costmodel import Cluster
from autopar.costmodel.device.narrow_kernels import recipes_of
from autopar.costmodel.frameworks import LOSSES, Framework
from autopar.errors import AutoparError
from autopar.integrations.importing.configuration import Configuration as Imported
from autopar.integrations.importing.configuration_plan import cuts_between, scheme_text
from autopar.ir import Graph
from autopar.ir.recipes import PLAIN, RECIPES, with_precision
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.planning.model.recompute import MODULES, modules_of
from autopar.planning.model.request import WITHOUT_LIMIT
from autopar.raising import ROWS, attention, raised
from benchmarks.validating.known import Shape
from benchmarks.validating.known.transformer import transformer

from . import steps
from .missing import Missing
from .rows import Row, Run, read_tables, training_rows
from .summed import Configuration, Priced
from .summed.analysed_graphs import own_kernels
from .summed.layer_distribution import layers_of_chunks
from .summed.part_seconds import parts_of
from .training import stated_seconds


AS_SPELLED = tuple(row for row in ROWS if row is not attention)
"""The rows for shapes: attention is in one kernel where the run's was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Defined:
    """A run as a row defines it, with its price by sums and the measured seconds of a step."""

    shape: Shape
    configuration: Configuration
    cluster: Cluster
    name: str
    summed: Priced
    measured: float | None

    def plan(self) -> Plan:
        """The plan of the run."""
        return plan_of_run(self.shape, self.configuration, self.cluster, self.name)


def defined(row: Row, run: Run) -> Defined | None:
    """The run of a row, with the likeliest of what it leaves open; None if it defines none."""
    seen: list[tuple[Configuration, Cluster, Priced]] = []

    def noting(shape: Shape, c: Configuration, cluster: Cluster) -> Priced:
        seen.append((c, cluster, steps.price(shape, c, cluster)))
        return seen[-1][-1]

    try:
        shape, best = steps.predict(row, noting)
    except (AutoparError, Missing):
        return None
    c, cluster, _ = next(one for one in seen if one[-1] is best)
    return Defined(
        shape=shape,
        configuration=c,
        cluster=cluster,
        name=steps.framework(row).name,
        summed=best,
        measured=run.seconds or stated_seconds(run, shape),
    )


def rows_of(data: Path, groups: Sequence[str]) -> list[tuple[Row, Run]]:
    """The rows of training runs in a folder, of these groups alone if there are some."""
    tables, _ = read_tables(data)
    return [(row, run) for row, run in training_rows(tables) if not groups or run.group in groups]


def plan_of_run(shape: Shape, c: Configuration, cluster: Cluster, name: str = "") -> Plan:
    """Return the plan of a run, priced as its framework runs it, whatever memory it needs.

    `name`: of the framework. Raises as `autopar.plan` does.
    """
    model = _model(shape, c, cluster)
    asked: dict[str, Any] = {
        "cluster": _cluster(c, cluster, name),
        "memory": WITHOUT_LIMIT,
        "stages": c.pipeline,
        "micro_batches": c.micro_batches,
        "recompute": _recompute(c, model.graph),
        "offload": "none",
    }
    if scheme := _scheme(c):
        asked["scheme"] = scheme
        if c.copies == 1:
            asked["zero"] = c.zero
    if c.interleave > 1:
        asked["interleave"] = c.interleave
    if c.pipeline > 1:
        parts = parts_of(shape, c, cluster.sized(c.devices))
        parameters = {name: one.parameters for name, one in parts.items()}
        asked["cuts"] = cuts_between(model.graph, layers_of_chunks(shape, c, parameters))
    return plan_loaded(model, **asked).plan


def free_plan_of_run(
    shape: Shape, c: Configuration, cluster: Cluster, name: str = "", *, seconds: float
) -> Plan:
    """The best plan of a run's model, batch and devices for its framework, within CPU seconds."""
    here = _cluster(c, cluster, name)
    return plan_loaded(
        _model(shape, c, cluster), cluster=here, memory=WITHOUT_LIMIT, seconds=seconds
    ).plan


def _model(shape: Shape, c: Configuration, cluster: Cluster) -> LoadedModel:
    recipe = _recipe(c.kernels.products, cluster)
    kernels = replace(
        own_kernels(shape, c),
        wide_loss=LOSSES[c.habits.loss].wide,
        products="" if recipe else c.kernels.products,
    )
    spelled = transformer(shape, batch=c.global_batch, dtype=c.dtype, kernels=kernels).graph
    graph = with_precision(raised(spelled, AS_SPELLED), recipe)
    return LoadedModel(graph=graph, source=graph, dtype=c.dtype, precision=recipe or PLAIN)


def _recipe(products: str, cluster: Cluster) -> str | None:
    """The recipe whose products run on kernels of this type."""
    has = [name for name in recipes_of(cluster.device) if name in RECIPES]
    return next((name for name in reversed(has) if RECIPES[name].kernel == products), None)


def _cluster(c: Configuration, cluster: Cluster, name: str) -> Cluster:
    work = Framework(name=name, habits=c.habits, kernels=c.kernels)
    return cluster.sized(c.devices).run_by(work)


def _recompute(c: Configuration, graph: Graph) -> str:
    """The mode of recompute, as the framework means it."""
    if c.recompute != "selective":
        return c.recompute
    if c.habits.saved_outputs:
        return "alternate"
    named = [name for name in c.recompute_modules or ["core_attn"] if name in MODULES]
    return ",".join(modules_of(graph, named)) or "selective"


def _scheme(c: Configuration) -> str:
    """The degrees of a run, as `autopar import` reads them in a file."""
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
        schedule=c.pipeline_schedule if c.pipeline > 1 else None,
        interleave=c.interleave,
    )
    return scheme_text(said, c.data)
