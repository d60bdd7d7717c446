"""Published runs of mixtures of experts, read from their arguments as `autopar import` reads them.

`data/expert_runs.json` has the arguments, the seconds and their sources.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from autopar.costmodel.known import Priced, Shape
from autopar.integrations.importing.megatron import read_megatron
from autopar.integrations.importing.megatron_run import price_run

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
