"""Published runs of mixtures of experts, read from their arguments as `autopar import` reads them.

`data/expert_runs.json` has the arguments, the seconds and their sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.costmodel import Cluster
from autopar.errors import UsageError
from autopar.integrations.importing.configuration import Configuration, number
from autopar.integrations.importing.megatron import read_megatron
from autopar.integrations.importing.megatron_framework import (
    MERGED,
    dispatcher_of,
    layout_of,
    megatron_framework,
    schedule_of,
)
from benchmarks.validating.known import Shape
from benchmarks.validating.summed import Configuration as Known
from benchmarks.validating.summed import Priced, price

from .machines import cluster_of
from .scores import Group, Sample
from .sizes import DATA, forward_flops, public_models

DISPATCHERS: Mapping[str, tuple[str, str, int]] = {
    "alltoall": ("alltoall", "", 1),
    "deepep": ("node", "moe-deepep-num-sms", 20),
    "hybridep": ("node", "moe-hybridep-num-sms", 16),
}
"""Dispatchers: ours, and the argument of their multiprocessors with its default."""


def expert_runs() -> list[Group]:
    """A group for each model and cluster."""
    text = (DATA / "expert_runs.json").read_text(encoding="utf-8")
    return [_group(sweep) for sweep in json.loads(text)["sweeps"]]


def _group(sweep: Mapping[str, Any]) -> Group:
    samples = [_sample(sweep, run) for run in sweep["runs"]]
    return Group(name=sweep["name"], samples=tuple(samples))


def _sample(sweep: Mapping[str, Any], run: Mapping[str, Any]) -> Sample:
    shape, priced = priced_run(sweep, run)
    batch = read_megatron(sweep["arguments"]).batch or 1
    return Sample(
        label=run["label"],
        sweep=sweep["name"],
        measured=run["seconds"],
        predicted=priced.step,
        work=3.0 * forward_flops(shape) * batch * shape.sequence / sweep["devices"],
        told_oom=not priced.fits,
        told_memory=priced.memory,
        arithmetic=priced.arithmetic,
    )


def priced_run(sweep: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[Shape, Priced]:
    """The model of a run, and the price of a step."""
    configuration = read_megatron(f"{sweep['arguments']} {run['arguments']}")
    shape = replace(
        public_models()[sweep["model"]], sequence=configuration.sequence or 1, dropout=False
    )
    cluster = cluster_of(sweep["gpu"]).sized(sweep["devices"])
    return shape, price_run(configuration, shape, cluster)


def price_run(configuration: Configuration, shape: Shape, cluster: Cluster) -> Priced:
    """Predict a step of the model on the cluster as Megatron-Core runs it."""
    given = configuration.arguments
    work = megatron_framework(configuration)
    if "fp8-param-gather" in given:
        work = replace(work, habits=replace(work.habits, gathered_bytes=1.0))
    modules = number("megatron", given, "mtp-num-layers") or 0
    shape = replace(shape.run_by(work), mtp=modules)
    run = known_run(configuration, shape, cluster.devices).run_by(work)
    return price(shape, run, cluster)


def known_run(configuration: Configuration, shape: Shape, devices: int) -> Known:
    """The configuration on so many devices, without its framework."""
    given = configuration.arguments
    data = configuration.degree_of_data(devices)
    dispatcher, sms = _dispatcher(given)
    micro_batch = configuration.micro_batch or 1
    return Known(
        global_batch=configuration.batch or micro_batch * data,
        micro_batch=micro_batch,
        tensor=configuration.tensor,
        pipeline=configuration.stages,
        data=data,
        context=configuration.context,
        context_by="heads" if given.get("cp-comm-type") == "a2a" else "ring",
        expert=configuration.expert,
        expert_tensor=configuration.expert_tensor or 0,
        dispatcher=dispatcher,
        dispatcher_sms=sms,
        overlap_experts=MERGED in given,
        overlap_shared="moe-shared-expert-overlap" in given,
        capacity=_capacity(given),
        zero=configuration.zero or 0,
        sequence_parallel=configuration.sequence_parallel,
        recompute=configuration.recompute or "none",
        recompute_modules=tuple(given.get("recompute-modules", "").split()),
        # A run says by `overlap_experts` that passes are merged.
        schedule=schedule_of(configuration.stages, configuration.interleave, merged=False)
        or "1f1b",
        interleave=configuration.interleave,
        layout=layout_of(configuration, len(shape.kinds())),
        dtype=configuration.dtype or "float32",
    )


def _dispatcher(given: Mapping[str, str]) -> tuple[str, int]:
    # Of one without a price the nearest stands for it.
    backend = given.get("moe-flex-dispatcher-backend", "deepep")
    kind = backend if dispatcher_of(given) == "node" else "alltoall"
    name, argument, default = DISPATCHERS[kind]
    return name, number("megatron", given, argument, default) or default


def _capacity(given: Mapping[str, str]) -> float:
    text = given.get("moe-expert-capacity-factor", "0")
    try:
        return float(text)
    except ValueError:
        raise UsageError(
            f"megatron: --moe-expert-capacity-factor is {text!r}, which is no number"
        ) from None
