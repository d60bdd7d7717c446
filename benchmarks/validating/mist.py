"""Runs of Mist's authors on L4, A10G and A100: their own plans, and Aceso's with its predictions.

Source: Dazz993/Mist@d69e530a.

Stages have devices, layers and recompute of their own (`known.uneven`). In Aceso's plans 13
operators are a layer, and recompute is given operator by operator. A layer that two stages share
counts by its operators.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat

from autopar.costmodel import Cluster
from autopar.costmodel.frameworks import framework_named
from benchmarks.validating.known import Shape
from benchmarks.validating.summed import Configuration, Priced

from .machines import cluster_of, locked, unlocked
from .missing import Missing
from .prepared import Prepared
from .scores import Sample
from .seen import taken_away
from .sizes import Row, number
from .uneven_pipelines import Stage

STAGE = re.compile(r"gpus=(\d+) ops=(\d+) tp=(\d+)x(\d+) dp=(\d+)x(\d+) recompute=(.*)")
OPERATORS = (
    ".norm1",
    ".attention.qkv",
    ".core.scores",
    ".core.softmax",
    ".core.dropout",
    ".core.context",
    ".attention.out",
    ".dropout1",
    ".norm2",
    ".mlp.up",
    ".mlp.gelu",
    ".mlp.down",
    ".dropout2",
)
"""Aceso's operators of a layer in their order, by our names."""
SHARDED = 5
HOSTED = 8
"""Indices in a strategy of Mist.

Whether the optimizer's states are sharded, and their share in host memory.

A strategy holds micro-batch, data and tensor parallelism, three stages of ZeRO, shares of weights,
gradients, states and activations (mist/analyzer/strategy.py).
"""
MIB = 2.0**20


def mist(row: Row) -> Prepared:
    """A plan of Mist: stages with recomputed layers, states sharded or in host memory."""
    kind = "flash2" if row["flash_attn"] == "1" else "fused"
    work = framework_named("mist")
    work = replace(work, kernels=replace(work.kernels, attention=kind))
    counts, again, strategies = (
        json.loads(row[name])
        for name in ("layer_partitions", "recomputed_layers_per_stage", "stage_strategies")
    )
    stages = list[Stage]()
    start = 0
    for layers, repeated, strategy in zip(counts, again, strategies, strict=True):
        micro, data, tensor = strategy[:3]
        states = work.habits.state_bytes * (1 - strategy[HOSTED])
        c = Configuration(
            global_batch=number(row, "global_batch"),
            micro_batch=micro,
            tensor=tensor,
            pipeline=len(counts),
            data=data,
            zero=1 if strategy[SHARDED] else 0,
            dtype="float16",
            habits=replace(work.habits, state_bytes=states),
            kernels=work.kernels,
        )
        groups = ((repeated, replace(c, recompute="full")), (layers - repeated, c))
        stages.append(Stage(layers=tuple(group for group in groups if group[0]), start=start))
        start += tensor * data
    label = f"mist {row['family']} {row['model']} on {row['gpus']} {row['gpu']}, {kind}"
    shape = _shape(row, gated=row["gated"] == "1", vocab=number(row, "vocab")).run_by(work)
    memory = max(json.loads(row["stage_peak_allocated_MB"])) * MIB
    return replace(_prepared(label, row, shape, stages), memory=memory)


def aceso(row: Row) -> Prepared:
    """A plan of Aceso, with Aceso's own predicted step."""
    if not row["step_s"]:
        raise Missing("no step time given")
    return aceso_plan(row)


def aceso_plan(row: Row) -> Prepared:
    """A plan of Aceso, with or without the time of a whole step."""
    work = framework_named("megatron-2021")
    shape = _shape(row, gated=False, vocab=50304).run_by(work)
    parsed = [STAGE.fullmatch(text.strip()) for text in row["stages"].split(";")]
    if any(match is None or match[4] != match[2] or match[6] != match[2] for match in parsed):
        raise Missing("operators of one stage on different meshes")
    matches = [match for match in parsed if match]
    flags = list(chain.from_iterable(_flags(match[7]) for match in matches))
    stages = list[Stage]()
    start = 0
    device = 0
    for match in matches:
        count = int(match[2])
        tensor = int(match[3])
        data = int(match[5])
        c = Configuration(
            global_batch=number(row, "global_batch"),
            micro_batch=max(number(row, "micro_batch") // data, 1),
            tensor=tensor,
            pipeline=len(matches),
            data=data,
            dtype="float16",
        ).run_by(work)
        groups = _groups(flags, start, start + count, shape.layers)
        start += count
        layers = tuple((share, _repeating(c, words)) for words, share in groups.items()) or (
            (0.0, c),
        )
        stages.append(Stage(layers=layers, start=device))
        device += tensor * data
    label = f"{row['system']} {row['model']} on {row['gpus']} {row['gpu']}, {len(stages)} stages"
    one = replace(_prepared(label, row, shape, stages), peer=_seconds(row["pred_step_s"]))
    # Mist's own runs are at the clock of the profile.
    cluster, others = unlocked(_machines(row), row["gpu"], profiled=_profiled(row))
    return replace(one, cluster=cluster, others=others, open="clock" if others else "")


def stage_samples(
    rows: Sequence[Row], plans: Sequence[Row]
) -> tuple[dict[str, list[Sample]], Counter[str]]:
    """Every stage of a plan with timed ranks, by device.

    Both passes of a micro-batch, and peak allocated memory.
    """
    ranks: dict[tuple[str, ...], list[Row]] = {}
    left_out: Counter[str] = Counter()
    known = {_run(row): row for row in plans}
    for row in rows:
        if _run(row) in known and row["stage"] and row["fwd_ms"]:
            ranks.setdefault((*_run(row), row["stage"]), []).append(row)
        else:
            left_out["its plan is in no table" if row["stage"] else "its stage is not given"] += 1
    samples: dict[str, list[Sample]] = {}
    priced: dict[tuple[str, ...], tuple[Prepared, tuple[Priced, ...]]] = {}
    for (*run, stage), members in ranks.items():
        key = tuple(run)
        if key not in priced:
            plan = aceso_plan(known[key])
            priced[key] = plan, tuple(map(plan.priced, (plan.cluster, *plan.others)))
        plan, prices = priced[key]
        price = prices[0]
        index = int(stage)
        micro_batches = plan.configuration.micro_batches
        seconds = (
            sum(float(row["fwd_ms"]) + float(row["bwd_ms"]) for row in members)
            / len(members)
            / micro_batches
            * 1e-3
        )
        both = [one.forward[index] + one.backward[index] for one in prices]
        samples.setdefault(key[0].partition("-")[0], []).append(
            Sample(
                label=f"{plan.label}: stage {stage}",
                measured=seconds,
                predicted=both[0],
                open=(plan.open,) if plan.open else (),
                range=(min(both), max(both)) if plan.others else None,
                memory=max(float(row["max_allocated_MB"]) for row in members) * MIB,
                told_memory=price.allocated[index],
            )
        )
    return samples, left_out


def _run(row: Row) -> tuple[str, ...]:
    return row["gpu"], row["system"], row["run"]


def _flags(text: str) -> Iterator[bool]:
    """Whether each operator is recomputed, from lengths of runs."""
    for flag, count in re.findall(r"([01])x(\d+)", text):
        yield from repeat(flag == "1", int(count))


def _groups(
    flags: Sequence[bool], start: int, stop: int, layers: int
) -> dict[tuple[str, ...], float]:
    """Count a stage's layers between operators `start` and `stop` by the operators recomputed.

    Operator 0 is the embedding.
    """
    seconds: dict[tuple[str, ...], float] = {}
    for index in range(layers):
        first = 1 + len(OPERATORS) * index
        own = len(range(max(first, start), min(first + len(OPERATORS), stop)))
        if own:
            words = tuple(word for place, word in enumerate(OPERATORS) if flags[first + place])
            seconds[words] = seconds.get(words, 0.0) + own / len(OPERATORS)
    return seconds


def _repeating(c: Configuration, words: tuple[str, ...]) -> Configuration:
    """The configuration with these operators of a layer recomputed."""
    if len(words) == len(OPERATORS):
        return replace(c, recompute="full")
    return (
        replace(c, recompute="selective", habits=replace(c.habits, selective=words)) if words else c
    )


def _shape(row: Row, *, gated: bool, vocab: int) -> Shape:
    heads = number(row, "heads")
    hidden = number(row, "hidden")
    # Aceso's profiled operators have a dropout, Mist's models none (mist/config.py).
    return Shape(
        layers=number(row, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=number(row, "kv_heads", heads) or heads,
        ffn=number(row, "ffn", 4 * hidden),
        vocab=vocab,
        sequence=number(row, "seq"),
        gated=gated,
        tied=False,
        bias=not gated,
        dropout="system" in row,
        norm="rms_norm" if gated else "layer_norm",
        position="rotary" if gated else "learned",
    )


def _profiled(row: Row) -> bool:
    """Whether kernels are those that were profiled on the row's device."""
    return "operators" not in taken_away(row)


def _machines(row: Row) -> Cluster:
    machines = cluster_of(row["gpu"], without=taken_away(row))
    return machines.sized(number(row, "gpus"))


def _prepared(label: str, row: Row, shape: Shape, stages: Sequence[Stage]) -> Prepared:
    return Prepared(
        label=label,
        shape=shape,
        configuration=stages[0].own,
        cluster=locked(_machines(row), row["gpu"], profiled=_profiled(row)),
        pipelines=(tuple(stages),),
        measured=_seconds(row["step_s"]),
    )


def _seconds(text: str) -> float | None:
    return float(text) if text else None
