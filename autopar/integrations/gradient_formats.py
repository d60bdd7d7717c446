"""Formats of gradients for a plan.

The user names them, or they are those that save most time within an error.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from autopar.costmodel import Cluster
from autopar.costmodel.step.gradient_compression import Gradient, chosen_formats
from autopar.costmodel.step.mesh_prices import MeshPrices
from autopar.errors import UsageError, unknown
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.sharding.analysis import analyse
from autopar.sharding.gradient_formats import check_format
from autopar.sharding.layout import local_shape
from autopar.sharding.mesh import Axes
from autopar.sharding.schedule import PLAINLY, Reductions


def compressed(
    plan: Plan,
    model: LoadedModel,
    cluster: Cluster,
    given: Mapping[str, Any],
    compress: Mapping[str, str] | float,
) -> dict[str, Any]:
    """The arguments of `plan_loaded` with formats of gradients.

    `plan` is the plan of the model without formats; `given` are the arguments that it was searched
    with.
    """
    if given.get("zero") not in (None, 0):
        raise UsageError(
            "gradient formats are for gradients that are summed whole, not for ZeRO "
            f"{given['zero']}: plan with zero=0, or give all "
            "gradients one type with reduce="
        )
    names = [tensor.name for tensor in model.graph.parameters if tensor.trainable]
    formats = (
        _named(names, compress)
        if isinstance(compress, Mapping)
        else _chosen(plan, model, cluster, float(compress))
    )
    before: Reductions = given.get("reductions", PLAINLY)
    return {**given, "zero": 0, "reductions": replace(before, formats=formats)}


def _named(names: list[str], wanted: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    formats: dict[str, str] = {}
    for pattern, form in wanted.items():
        fitting = [name for name in names if name == pattern or fnmatch.fnmatchcase(name, pattern)]
        if not fitting:
            raise UsageError(unknown("parameter to compress", pattern, names[:50]))
        formats.update(dict.fromkeys(fitting, check_format(form)))
    return tuple(formats.items())


def _chosen(
    plan: Plan, model: LoadedModel, cluster: Cluster, budget: float
) -> tuple[tuple[str, str], ...]:
    """The formats within a relative error, priced by the reductions of the plan without them."""
    if not 0 <= budget < 1:
        raise UsageError(
            f"compress={budget} is a relative error of the gradients: from 0 to below 1"
        )
    execution = plan.execution(analyse(model.graph, train=plan.model.mode == "train"))
    gradients: dict[str, Gradient] = {}
    for chunk in execution.chunks:
        program = chunk.whole.program
        prices = MeshPrices(cluster=cluster, mesh=chunk.mesh)
        for bucket in chunk.whole.buckets:
            for name in bucket.parameters:
                shape = local_shape(
                    program.assignment.storage[name],
                    program.graph.tensors[name].shape,
                    chunk.mesh.shape,
                )
                gradients[name] = Gradient(
                    shape=shape,
                    dtype=chunk.whole.schedule.reduced(program.graph.tensors[name]),
                    seconds=_sending(prices, bucket.sums),
                )
    return tuple(chosen_formats(gradients, budget).items())


def _sending(prices: MeshPrices, sums: tuple[Axes, ...]) -> Callable[[float], float]:
    """The seconds that bytes of a gradient add to the all-reduces over each of `sums`."""

    def seconds(nbytes: float) -> float:
        # A parameter shares its bucket's messages with others, so it pays no latency of its own.
        return math.fsum(
            float(
                prices.seconds("all_reduce", axes, round(nbytes))
                - prices.seconds("all_reduce", axes, 0)
            )
            for axes in sums
        )

    return seconds
