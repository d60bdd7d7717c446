"""Published figures of memory without a run.

States of ZeRO, and stored and kept bytes of a first pipeline stage.

Peaks measured in a run are scored with the run. Sources: S. Rajbhandari et al., "ZeRO: memory
optimizations toward training trillion parameter models" (2020), table 1; V. Korthikanti et al.,
"Reducing activation recomputation in large transformer models" (2022), figures 1 and 7, whose
figures follow from formulas. A ratio is to the same configuration with tensor parallelism alone.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from autopar.costmodel.frameworks import Habits
from autopar.errors import UsageError
from autopar.order.schedules import in_flight
from benchmarks.validating.summed.configuration import Configuration
from benchmarks.validating.summed.part_figures import PartSeconds
from benchmarks.validating.summed.part_seconds import parts_of
from benchmarks.validating.summed.stage_memory import stored_bytes, working

from .machines import cluster_of
from .rows import Row, Run, Table
from .scores import Group, Sample
from .sizes import shape_of
from .steps import configuration_of, framework
from .training import attempted

GB = 1e9
GIB = 2.0**30
ZERO = re.compile(r"DP=(\d+) ZeRO stage ([123])")
STATES = "params+grads+optimizer"
BASELINE = "activations, TP baseline no recompute"
KEPT: Mapping[str, tuple[str, bool]] = {
    BASELINE: ("none", False),
    "activations, selective + sequence parallel": ("selective", True),
    "sequence parallel only": ("none", True),
    "selective recompute only": ("selective", False),
    "both": ("selective", True),
    "full recompute": ("full", False),
}
"""Recompute and sequence parallelism of the configuration in a row."""


def memory_groups(table: Table, runs: Sequence[tuple[Row, Run]]) -> list[Group]:
    """States by ZeRO's table, and stages by the figures.

    `runs`: training runs with the models of the figures.
    """
    samples: dict[str, list[Sample]] = {"ZeRO states": [], "stage": [], "ratio": []}
    left_out: Counter[str] = Counter()
    for number, row in enumerate(table.rows):
        kind = row["component"]
        if row["kind"].startswith("measured ("):
            left_out["measured in a training run, and scored with it"] += 1
        elif kind != "model states per GPU" and kind != STATES and kind not in KEPT:
            left_out["a formula, or a figure of another kind"] += 1
        else:
            name = "stage"
            unit = GIB
            if kind == "model states per GPU":
                name = "ZeRO states"
                unit = GB
            elif row["unit"].startswith("%"):
                name = "ratio"
                unit = 0.01
            measured = value(row, table, number) * unit
            told = attempted(partial(PREDICTED[name], row, runs))
            if told is None or isinstance(told, str):
                left_out[told or "its configuration is not given"] += 1
            else:
                label = f"{row['model']}, {kind}, {row['config']}"
                samples[name].append(Sample(label=label, measured=measured, predicted=told))
    groups = [
        Group(
            name=f"{table.name}, {name}",
            samples=tuple(members),
            unit="of the baseline" if name == "ratio" else "bytes",
        )
        for name, members in samples.items()
    ]
    return [replace(groups[0], left_out=left_out), *groups[1:]]


def value(row: Row, table: Table, number: int) -> float:
    """The figure of a row."""
    try:
        return float(row["value"])
    except ValueError as error:
        raise UsageError(
            f"{table.path.name}, row {number + 1}, column value: {row['value']!r} is no number"
        ) from error


def zero_states(row: Row, _: Sequence[tuple[Row, Run]]) -> float | None:
    """Bytes of parameters, gradients and Adam's states in mixed precision at a stage of ZeRO."""
    match = ZERO.search(row["config"])
    if match is None or not row["params_b"]:
        return None
    data = int(match[1])
    stage = int(match[2])
    c = Configuration(global_batch=data, data=data, zero=stage, habits=Habits(gradient_bytes=2))
    return stored_bytes(PartSeconds(parameters=float(row["params_b"]) * 1e9), c)


def stage_bytes(row: Row, runs: Sequence[tuple[Row, Run]]) -> float | None:
    """Bytes that the layers of the first pipeline stage store, or keep."""
    published = next(
        (
            step
            for step, run in runs
            if run.model == row["model"] and run.framework == "Megatron-LM 2022"
        ),
        None,
    )
    if published is None:
        return None
    kind = framework(published)
    shape = shape_of(published, kind)
    c = configuration_of(published, kind)
    cluster = cluster_of(published["gpu"], published["network"])
    layers = shape.layers / c.pipeline
    if row["component"] == STATES:
        return stored_bytes(parts_of(shape, c, cluster.sized(c.devices))["dense"], c) * layers
    recompute, sequence = KEPT[row["component"]]
    chosen = replace(c, recompute=recompute, sequence_parallel=sequence)
    flying = in_flight(c.pipeline_schedule, 0, c.pipeline, c.micro_batches, c.interleave)
    return working(shape, chosen, cluster)["dense"].saved * layers * flying


def ratio(row: Row, runs: Sequence[tuple[Row, Run]]) -> float | None:
    """Bytes kept by the layers, over those with tensor parallelism alone."""
    ours = stage_bytes(row, runs)
    base = stage_bytes({**row, "component": BASELINE}, runs)
    return ours / base if ours is not None and base is not None else None


PREDICTED: Mapping[str, Callable[[Row, Sequence[tuple[Row, Run]]], float | None]] = {
    "ZeRO states": zero_states,
    "stage": stage_bytes,
    "ratio": ratio,
}
