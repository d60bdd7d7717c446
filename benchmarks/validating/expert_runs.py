"""Published runs of mixtures of experts, read from their arguments and priced by `autopar import`.

`data/expert_runs.json` has the arguments, the seconds and their sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.integrations.importing import Hardware, Imported, import_configuration
from autopar.integrations.importing.configuration import number
from autopar.integrations.importing.megatron import read_megatron
from autopar.integrations.importing.megatron_framework import megatron_framework
from autopar.ir.recipes import PLAIN, with_precision
from autopar.model import LoadedModel
from autopar.raising import raised
from benchmarks.validating.known import Shape
from benchmarks.validating.known.transformer import transformer

from .machines import cluster_of
from .scores import Group, Sample
from .sizes import DATA, forward_flops, public_models


def expert_runs() -> list[Group]:
    """A group for each model and cluster."""
    text = (DATA / "expert_runs.json").read_text(encoding="utf-8")
    return [_group(sweep) for sweep in json.loads(text)["sweeps"]]


def _group(sweep: Mapping[str, Any]) -> Group:
    samples = [_sample(sweep, run) for run in sweep["runs"]]
    return Group(name=sweep["name"], samples=tuple(samples))


def _sample(sweep: Mapping[str, Any], run: Mapping[str, Any]) -> Sample:
    shape, imported = imported_run(sweep, run)
    configuration = imported.configuration
    predicted = imported.planned.plan.predicted
    tokens = (configuration.batch or 1) * shape.sequence
    return Sample(
        label=run["label"],
        sweep=sweep["name"],
        measured=run["seconds"],
        predicted=predicted.step,
        work=3.0 * forward_flops(shape) * tokens / sweep["devices"],
        told_oom=not imported.fits,
        told_memory=predicted.memory,
    )


def imported_run(sweep: Mapping[str, Any], run: Mapping[str, Any]) -> tuple[Shape, Imported]:
    """The model of a run, and its plan as its arguments describe it."""
    configuration = read_megatron(f"{sweep['arguments']} {run['arguments']}")
    modules = number("megatron", configuration.arguments, "mtp-num-layers") or 0
    shape = replace(
        public_models()[sweep["model"]], sequence=configuration.sequence or 1, dropout=False
    )
    work = megatron_framework(configuration)
    shape = replace(shape.run_by(work), mtp=modules)
    dtype = configuration.dtype or "float32"
    kernels = replace(work.kernels, products="")
    spelled = transformer(shape, batch=configuration.batch or 1, dtype=dtype, kernels=kernels)
    graph = with_precision(raised(spelled.graph), configuration.precision)
    model = LoadedModel(
        graph=graph, source=graph, dtype=dtype, precision=configuration.precision or PLAIN
    )
    hardware = Hardware(devices=sweep["devices"], cluster=cluster_of(sweep["gpu"]))
    return shape, import_configuration(configuration, model, hardware, compare=False)
