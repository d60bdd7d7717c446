"""Runs of Mist's authors on L4, A10G and A100: their own plans, and Aceso's with its predictions.

Source: Dazz993/Mist@d69e530a.

Of their plans those whose stages are alike but for their numbers of layers. In Aceso's plans 13
operators are a layer, and recompute is given operator by operator.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, pairwise, repeat

from autopar.costmodel import Cluster
from autopar.costmodel.frameworks import framework_named
from benchmarks.validating.known import Shape

from .configuration import Configuration
from .machines import cluster_of, locked, unlocked
from .missing import Missing
from .prepared import Prepared
from .priced import Priced
from .scores import Sample
from .seen import taken_away
from .sizes import Row, number

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
    ways = {tuple(strategy) for strategy in strategies}
    if len(ways) > 1 or (any(again) and again != counts):
        raise Missing("stages on meshes, or with recompute, of their own")
    micro, data, tensor, *rest = ways.pop()
    states = work.habits.state_bytes * (1 - rest[HOSTED - 3])
    c = Configuration(
        global_batch=number(row, "global_batch"),
        micro_batch=micro,
        tensor=tensor,
        pipeline=len(counts),
        data=data,
        dealt=tuple(counts),
        zero=1 if rest[SHARDED - 3] else 0,
        recompute="full" if any(again) else "none",
        dtype="float16",
        habits=replace(work.habits, state_bytes=states),
        kernels=work.kernels,
    )
    label = f"mist {row['family']} {row['model']} on {row['gpus']} {row['gpu']}, {kind}"
    shape = _shape(row, gated=row["gated"] == "1", vocab=number(row, "vocab")).run_by(work)
    memory = max(json.loads(row["stage_peak_allocated_MB"])) * MIB
    return replace(_prepared(label, row, shape, c), memory=memory, framework=work.name)


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
    counts = _layers([int(match[2]) for match in matches])
    meshes = {(int(match[3]), int(match[5])) for match in matches}
    if len(meshes) > 1 or len(set(flags[1 : 1 + len(OPERATORS) * shape.layers])) > 1:
        raise Missing("stages on meshes, or with recompute, of their own")
    if sum(counts) != shape.layers or min(counts) < 1:
        raise Missing("stages that share a layer")
    tensor, data = meshes.pop()
    c = Configuration(
        global_batch=number(row, "global_batch"),
        micro_batch=max(number(row, "micro_batch") // data, 1),
        tensor=tensor,
        pipeline=len(matches),
        data=data,
        dealt=tuple(counts),
        recompute="full" if flags[1] else "none",
        dtype="float16",
    ).run_by(work)
    label = f"{row['system']} {row['model']} on {row['gpus']} {row['gpu']}, {len(counts)} stages"
    one = _prepared(label, row, shape, c)
    one = replace(one, peer=_seconds(row["pred_step_s"]), framework=work.name)
    # Mist's own runs are at the clock of the profile.
    cluster, others = unlocked(_machines(row), row["gpu"], profiled=_profiled(row))
    return replace(one, cluster=cluster, open="clock" if others else "")


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
    priced: dict[tuple[str, ...], tuple[Prepared, Priced]] = {}
    for (*run, stage), members in ranks.items():
        key = tuple(run)
        try:
            if key not in priced:
                plan = aceso_plan(known[key])
                priced[key] = plan, plan.priced()
        except Missing as error:
            left_out[str(error)] += 1
            continue
        plan, price = priced[key]
        index = int(stage)
        micro_batches = plan.configuration.micro_batches
        seconds = (
            sum(float(row["fwd_ms"]) + float(row["bwd_ms"]) for row in members)
            / len(members)
            / micro_batches
            * 1e-3
        )
        samples.setdefault(key[0].partition("-")[0], []).append(
            Sample(
                label=f"{plan.label}: stage {stage}",
                measured=seconds,
                predicted=price.forward[index] + price.backward[index],
                open=(plan.open,) if plan.open else (),
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


def _layers(operators: Sequence[int]) -> list[int]:
    """The layers of stages of so many operators, of which the first is the embedding."""
    ends = [round((end - 1) / len(OPERATORS)) for end in accumulate(operators)]
    return [end - start for start, end in pairwise((0, *ends))]


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


def _prepared(label: str, row: Row, shape: Shape, c: Configuration) -> Prepared:
    return Prepared(
        label=label,
        shape=shape,
        configuration=c,
        cluster=locked(_machines(row), row["gpu"], profiled=_profiled(row)),
        measured=_seconds(row["step_s"]),
    )


def _seconds(text: str) -> float | None:
    return float(text) if text else None
