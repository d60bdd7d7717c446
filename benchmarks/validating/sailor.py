"""Sailor's runs and layers (eth-easl/sailor@cf2c8e3c), on GH200 and on mixed RTX hosts.

The mixed hosts have RTX 3090, RTX 2080 and Titan RTX.

Read in that repository: Megatron-DeepSpeed in float32 without mixed precision, ZeRO or recompute.
The image (NGC 24.10, Dockerfile) lets products read float32 as tensor units do, if a device has
such. Scores are masked and normalised by torch's kernels, since the fused one is for 16 bits.
Messages and the reduction of gradients do not overlap. A stage's entries count the embedding and
the head as a layer each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel import Cluster, load_cluster
from autopar.costmodel.cluster.level import Level
from autopar.costmodel.cluster.measured_collectives import Curve, Measured
from autopar.costmodel.device.device import TF32
from autopar.costmodel.frameworks import Framework, framework_named
from benchmarks.validating.known import Shape

from .configuration import Configuration
from .missing import Missing
from .prepared import Prepared, further_layer
from .scores import Sample
from .seen import taken_away
from .sizes import Row, number

STAGE = re.compile(r"L(\d+):(.*)")
ITEM = re.compile(r"([\w-]+)xTP(\d+)\*(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A node: `devices` like those of a preset, with other figures by data sheet.

    `peak`: FLOP/s in float32; `tensor`: FLOP/s in 16 bits of tensor units that also read float32
    (0: none). `reduces`: B/s of all-reduces by group, from splitting profiled layers of OPT-350.
    `port`: B/s of the node's network, by the authors' own test of messages (sailor/providers),
    shared by `shared_by` devices.
    """

    like: str
    devices: int
    peak: float
    tensor: float
    memory: float
    capacity: float
    units: float
    port: float
    shared_by: int
    reduces: Mapping[int, float]
    dispatch: float = 0.0


HOSTS: Mapping[str, Host] = {
    "GH-96": Host(
        like="dgx-h100",
        devices=4,
        peak=67e12,
        tensor=989e12,
        memory=4e12,
        capacity=96e9,
        units=132,
        port=22.9e9,
        shared_by=1,
        reduces={},
        # Layers of OPT-350 over four devices take 1.7 ms forward with two sequences as with four:
        # 26 calls of the host.
        dispatch=65e-6,
    ),
    "A100-40": Host(
        like="dgx-a100",
        devices=4,
        peak=19.5e12,
        tensor=312e12,
        memory=1.555e12,
        capacity=40 * 2**30,
        units=108,
        port=2.4e9,
        shared_by=4,
        reduces={},
    ),
    "A100-80": Host(
        like="dgx-a100-80g",
        devices=4,
        peak=19.5e12,
        tensor=312e12,
        memory=2.039e12,
        capacity=80 * 2**30,
        units=108,
        port=4.5e9,
        shared_by=4,
        reduces={},
    ),
    "V100-16": Host(
        like="p3.16xlarge",
        devices=8,
        peak=15.7e12,
        tensor=0.0,
        memory=9e11,
        capacity=16 * 2**30,
        units=80,
        port=5.8e9,
        shared_by=8,
        reduces={},
    ),
    "RTX-3090": Host(
        like="g5",
        devices=8,
        peak=35.6e12,
        tensor=71.2e12,
        memory=936e9,
        capacity=24 * 2**30,
        units=82,
        port=0.1157e9,
        shared_by=8,
        reduces={2: 31e9, 4: 3.2e9, 8: 0.84e9},
    ),
    "RTX-2080": Host(
        like="p3.16xlarge",
        devices=8,
        peak=13.45e12,
        tensor=0.0,
        memory=616e9,
        capacity=11 * 2**30,
        units=68,
        port=2.857e9,
        shared_by=8,
        reduces={2: 3.87e9, 4: 3.14e9, 8: 2.8e9},
    ),
    "Titan-RTX": Host(
        like="p3.16xlarge",
        devices=8,
        peak=16.3e12,
        tensor=0.0,
        memory=672e9,
        capacity=24 * 2**30,
        units=72,
        port=2.857e9,
        shared_by=8,
        reduces={2: 3.8e9, 4: 3.15e9, 8: 2.83e9},
    ),
}
"""By the word of a row.

RTX-2080 has the bandwidth of the Ti by its profiled update of weights, 453 GB/s of 616.
"""
PEERS = 3
"""Other devices of a GH200 node, each joined by a third of the NVLinks."""


def node(word: str, *, unfitted: bool = False) -> Cluster:
    """One node of a kind, with or without what was read off its layers."""
    if word not in HOSTS:
        raise Missing(f"no machine for {word}")
    host = HOSTS[word]
    known = load_cluster(host.like)
    rates = {"float32": host.peak} | (
        {"float16": host.tensor, "bfloat16": host.tensor} if host.tensor else {}
    )
    device = replace(
        known.device,
        name=word,
        peak={**known.device.peak, **rates},
        memory_bandwidth=host.memory,
        memory_capacity=host.capacity,
        units=host.units,
        dispatch=(0.0 if unfitted else host.dispatch) or known.device.dispatch,
    )
    inner = replace(known.levels[0], size=host.devices, features=())
    if host.like == "dgx-h100":
        inner = replace(inner, peer_bandwidth=inner.bandwidth / PEERS)
    if host.reduces:
        inner = Level(
            name="pcie", size=host.devices, latency=1e-5, bandwidth=max(host.reduces.values())
        )
    measured = tuple(
        Measured(
            kind="all_reduce", level=inner.name, group=group, curve=Curve(alpha=0.0, beta=1 / rate)
        )
        for group, rate in host.reduces.items()
    )
    port = Level(name="nic", size=1, latency=3e-5, bandwidth=host.port, shared_by=host.shared_by)
    return Cluster(name=word, device=device, levels=(inner, port), measured=measured)


def framework(word: str) -> Framework:
    """The framework that ran.

    Float32, states without a master, updates in one kernel, gradients zeroed.
    """
    work = framework_named("megatron-deepspeed")
    habits = replace(work.habits, gradient_bytes=4, reduced_bytes=4, update_traffic=32.0)
    products = TF32 if word in HOSTS and HOSTS[word].tensor else ""
    return replace(
        work,
        habits=habits,
        kernels=replace(work.kernels, attention="unfused", skips_masked=False, products=products),
    )


def sailor(row: Row) -> Prepared:
    """A run on devices of one kind."""
    if "model has" in row["trap"]:
        raise Missing(f"a trap: {row['trap']}")
    stages = [STAGE.fullmatch(text.strip()) for text in row["stages"].split(";")]
    if not all(stages):
        raise Missing(f"stages not understood: {row['stages']}")
    counts = [int(match[1]) for match in stages if match]
    counts[0] -= 1
    counts[-1] -= 1
    layers = number(row, "layers")
    if sum(counts) != layers:
        raise Missing(f"the stages have {sum(counts)} layers, the model {layers}")
    items = [[match.groups() for match in ITEM.finditer(one[2])] for one in stages if one]
    replicas = [
        [(word, int(tensor)) for word, tensor, often in stage for _ in range(int(often))]
        for stage in items
    ]
    if len({one for stage in replicas for one in stage}) > 1:
        raise Missing("replicas on devices of several kinds")
    if len(set(map(len, replicas))) > 1:
        raise Missing("stages of other numbers of replicas")
    word, tensor = replicas[0][0]
    c = _configuration(row, word, tensor, len(replicas[0]), counts)
    return Prepared(
        label=f"{row['model']} on {row['gpus']} {row['gpu_types']}: {row['stages']}",
        shape=_shape(row),
        cluster=node(word, unfitted="host" in taken_away(row)).sized(number(row, "gpus")),
        configuration=c,
        framework=framework(word).name,
        measured=float(row["step_s"]),
        memory=float(row["peak_mem_bytes"]),
        occupied=True,
    )


def _configuration(
    row: Row, word: str, tensor: int, data: int, counts: Sequence[int]
) -> Configuration:
    return Configuration(
        global_batch=number(row, "global_batch"),
        micro_batch=number(row, "micro_batch"),
        tensor=tensor,
        pipeline=len(counts),
        data=data,
        dealt=tuple(counts),
        dtype="float32",
    ).run_by(framework(word))


def _shape(row: Row) -> Shape:
    hidden = number(row, "hidden")
    heads = number(row, "heads")
    return Shape(
        layers=number(row, "layers", 1),
        hidden=hidden,
        heads=heads,
        kv_heads=number(row, "kv_heads", heads),
        ffn=number(row, "ffn", 4 * hidden),
        vocab=number(row, "vocab", 50304),
        sequence=number(row, "seq", 2048),
        tied=False,
        dropout=False,
    )


def layer_sample(row: Row) -> tuple[str, Sample]:
    """A profiled layer, both passes.

    The group names whether collectives of tensor parallelism are in it.
    """
    if not row["seq"]:
        raise Missing("not given: seq")
    word = row["gpu"]
    tensor = number(row, "tp")
    micro = number(row, "micro_batch")
    if number(row, "heads") % tensor:
        raise Missing("heads that do not divide")
    work = framework(word)
    if (
        row["model"] == "OPT-30"
    ):  # 18 of the 19.5 TFLOP/s that an A100 has in float32 without tensor units
        work = replace(work, kernels=replace(work.kernels, products=""))
    c = Configuration(global_batch=micro, micro_batch=micro, tensor=tensor, dtype="float32")
    one = Prepared(
        label="",
        shape=_shape(row).run_by(work),
        configuration=c.run_by(work),
        framework=work.name,
        cluster=node(word, unfitted="host" in taken_away(row)).sized(tensor),
        measured=None,
    )
    first, second = further_layer(one)
    passes = ("forward", "backward")
    label = f"{row['model']}, {word}, tensor {tensor}, micro-batch {micro}"
    measured = sum(float(row[name]) for name in ("layer_fwd_s", "layer_bwd_s"))
    predicted = sum(getattr(second, name)[0] - getattr(first, name)[0] for name in passes)
    kind = "OPT-30 " if row["model"] == "OPT-30" else ""
    return f"sailor_layers {kind}{'split' if tensor > 1 else 'whole'}", Sample(
        label=label, measured=measured, predicted=predicted
    )
