"""Runs on L4, A10G and A100 that Mist's authors measured: their own plans, and Aceso's with its predictions (Dazz993/Mist@d69e530a).

Only plans whose stages have as many devices each are priced: what is recomputed is a share of the layers, or of their operators, the mean
over the stages.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from autopar.costmodel.known.configuration import Configuration
from autopar.costmodel.known.frameworks import framework_named
from autopar.costmodel.known.shape import Shape

from .machines import cluster_of
from .missing import Missing
from .prepared import Prepared
from .sizes import Row, number

STAGE = re.compile(r"gpus=(\d+) ops=(\d+) tp=(\d+)x(\d+) dp=(\d+)x(\d+) recompute=(.*)")
ALIKE = 0.2
"""How far the operators of a stage may be from the mean of all stages."""
MIB = 2.0**20


def mist(row: Row) -> Prepared:
    """A plan of Mist: stages of one mesh each, some layers recomputed, the optimizer sharded where data parallel."""
    meshes = {tuple(mesh) for mesh in json.loads(row["device_assignment_dp_tp"])}
    if len(meshes) != 1:
        raise Missing("stages of different meshes")
    data, tensor = meshes.pop()
    layers, stages = number(row, "layers"), len(json.loads(row["layer_partitions"]))
    shape = _shape(row, gated=row["gated"] == "1", vocab=number(row, "vocab"))
    kind = "flash2" if row["flash_attn"] == "1" else "fused"
    share = sum(json.loads(row["recomputed_layers_per_stage"])) / layers
    batch, steps = number(row, "global_batch"), number(row, "grad_accum")
    return _prepared(
        f"mist {row['family']} {row['model']} on {row['gpus']} {row['gpu']}, {kind}", row, shape, kind=kind, share=share, batch=batch,
        micro=max(batch // (steps * data), 1), tensor=tensor, stages=stages, data=data, measured=row["step_s"],
        memory=max(json.loads(row["stage_peak_allocated_MB"])) * MIB,
    )  # fmt: skip


def aceso(row: Row) -> Prepared:
    """A plan of Aceso, whose own predicted step stands beside."""
    if not row["step_s"]:
        raise Missing("no step time given")
    found = [STAGE.fullmatch(text.strip()) for text in row["stages"].split(";")]
    stages = [match for match in found if match]
    if len(stages) != len(found) or len({match[1] for match in stages}) != 1:
        raise Missing("stages of different meshes")
    counts = [int(match[2]) for match in stages]
    if any(abs(count * len(counts) / sum(counts) - 1) > ALIKE for count in counts):
        raise Missing("stages of different lengths")
    if any(match[4] != match[2] or match[6] != match[2] for match in stages):
        raise Missing("operators of one stage on different meshes")
    again = sum(int(n) for match in stages for one, n in re.findall(r"([01])x(\d+)", match[7]) if one == "1")
    data = int(stages[0][5])
    return _prepared(
        f"aceso {row['model']} on {row['gpus']} {row['gpu']}, {len(stages)} stages", row, _shape(row, gated=False, vocab=50304),
        kind="fused", share=again / sum(counts), batch=number(row, "global_batch"), micro=max(number(row, "micro_batch") // data, 1),
        tensor=int(stages[0][3]), stages=len(stages), data=data, measured=row["step_s"], peer=row["pred_step_s"],
    )  # fmt: skip


def _shape(row: Row, *, gated: bool, vocab: int) -> Shape:
    heads, hidden = number(row, "heads"), number(row, "hidden")
    return Shape(
        layers=number(row, "layers"), hidden=hidden, heads=heads, kv_heads=number(row, "kv_heads", heads) or heads,
        ffn=number(row, "ffn", 4 * hidden), vocab=vocab, sequence=number(row, "seq"), gated=gated, tied=False, bias=not gated,
        dropout=False, norm="rms_norm" if gated else "layer_norm", position="rotary" if gated else "learned",
    )  # fmt: skip


def _prepared(
    label: str, row: Row, shape: Shape, *, kind: str, share: float, batch: int, micro: int, tensor: int, stages: int, data: int,
    measured: str, memory: float | None = None, peer: str = "",
) -> Prepared:  # fmt: skip
    work = framework_named("megatron-2022")
    work = replace(work, habits=replace(work.habits, recomputed=share), kernels=replace(work.kernels, attention=kind))
    c = Configuration(
        global_batch=batch, micro_batch=micro, tensor=tensor, pipeline=stages, data=data, zero=1, dtype="float16",
        recompute="full" if share else "none",
    )  # fmt: skip
    return Prepared(
        label=label, shape=shape, configuration=work.run(c), cluster=cluster_of(row["gpu"]), measured=float(measured), memory=memory,
        peer=float(peer) if peer else None,
    )  # fmt: skip
