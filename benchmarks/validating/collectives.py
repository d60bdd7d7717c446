"""Collectives of published measurements and of the model.

One cluster a machine, nothing set for a single row.

A row gives a time, or an algorithm or bus bandwidth at a size; `bus_bandwidth` of
`autopar.costmodel.collectives` converts it. "Large" without a figure is 1 GiB. Left out, with the
reason: rows without a size, machines without a preset, and rows that are no collective.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from autopar.costmodel import Cluster, collective_time, load_cluster
from autopar.costmodel.collectives.bus_bandwidth import bus_factor

from .machines import without_features
from .seen import taken_away

LARGE = 2**30
BIG = 2**20
"""From this many bytes on a message is counted as large."""
KINDS = {
    "alltoall": "all_to_all",
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A machine.

    `words`: contained in a row's machine. `cluster`: its preset. `nodes`: the number that "multi"
    means. `pair`: B/s between two devices of a node, if it is wired differently.
    """

    name: str
    words: tuple[str, ...]
    cluster: str
    nodes: int = 4
    pair: float | None = None


MACHINES = (
    Machine(name="A100 node", words=("DGX/HGX A100-SXM 8-GPU",), cluster="dgx-a100-80g"),
    Machine(name="V100 node (vTrain)", words=("V100", "vTrain trace"), cluster="p3.16xlarge"),
    Machine(name="A100 node (vTrain)", words=("vTrain trace",), cluster="dgx-a100-80g"),
    Machine(
        name="A100 node (Galvatron)",
        words=("Galvatron reference cluster 1 node", "(fits 8x A100"),
        cluster="dgx-a100-80g",
    ),
    Machine(name="A100, vendor's figures", words=("A100 NVLink3",), cluster="dgx-a100-80g"),
    Machine(name="A100, vendor's figures", words=("DGX A100 8x200Gb",), cluster="dgx-a100-80g"),
    Machine(name="p4de, 2 nodes", words=("p4de.24xlarge",), cluster="p4d"),
    Machine(name="H100 node (p5)", words=("p5.48xlarge single node",), cluster="p5"),
    Machine(name="H200 node", words=("8x H200 node",), cluster="hgx-h200"),
    Machine(name="V100 node", words=("V100", "(1 node)"), cluster="p3.16xlarge"),
    # Six links of 25 GB/s to three others, two to each.
    Machine(name="V100 node of 4", words=("4x V100 node",), cluster="p3.16xlarge", pair=50e9),
)
UNSTATED = ("profiler default",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row: bytes, seconds measured and predicted."""

    label: str
    size: float
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The rows of a group, and the number of left-out rows by reason."""

    points: list[Point] = field(default_factory=list)
    left_out: dict[str, int] = field(default_factory=dict)


def scored(rows: Iterable[Mapping[str, str]]) -> dict[str, Scored]:
    """Rows by machine; left-out rows are counted under "left out"."""
    groups: dict[str, Scored] = {}
    for row in rows:
        machine = next(
            (m for m in MACHINES if all(word in row["machine"] for word in m.words)), None
        )
        reason = _unusable(row, machine)
        if machine is None or reason is not None:
            counts = groups.setdefault("left out", Scored()).left_out
            counts[reason or ""] = counts.get(reason or "", 0) + 1
        else:
            groups.setdefault(machine.name, Scored()).points.append(_point(row, machine))
    return groups


def _unusable(row: Mapping[str, str], machine: Machine | None) -> str | None:
    if any(word in row["size_bytes"] for word in UNSTATED):
        return "the size is the tool's default, which the source does not state"
    if row["collective"] not in KINDS:
        return f"{row['collective']} is not a collective"
    if machine is None:
        return f"no preset for {row['machine']}"
    if row["gpus"] != "multi" and not (
        row["gpus"].isdigit()
        and row["nodes"].isdigit()
        and int(row["gpus"]) % int(row["nodes"]) == 0
    ):
        return "the ranks on each node are not stated"
    if not any(
        row[column] and float(row[column]) > 0 for column in ("time_us", "busbw_GBps", "algbw_GBps")
    ):
        return "it states no time"
    return None


def size_of(text: str) -> float:
    """Bytes of a row: a number, "4GB ..." or "large"."""
    if text.startswith("large"):
        return LARGE
    figure, is_gb, _ = text.partition("GB")
    return float(figure) * (1e9 if is_gb else 1)


def _point(row: Mapping[str, str], machine: Machine) -> Point:
    kind = KINDS[row["collective"]]
    size = size_of(row["size_bytes"])
    nodes = machine.nodes if row["nodes"] == "multi" else int(row["nodes"])
    ranks = 8 * nodes if row["gpus"] == "multi" else int(row["gpus"])
    cluster = _cluster(row, machine).sized(8 * nodes)
    if nodes == 1:
        level = "nvlink"
    elif ranks > nodes:
        level = f"nvlink:{ranks // nodes}+nic:{nodes}"
    else:
        level = "nic"
    predicted = float(collective_time(kind, size, ranks, level=level, cluster=cluster))
    label = f"{kind} of {size:.0f} B on {ranks} GPUs"
    return Point(
        label=label, size=size, measured=_measured(row, kind, size, ranks), predicted=predicted
    )


def _cluster(row: Mapping[str, str], machine: Machine) -> Cluster:
    cluster = load_cluster(machine.cluster)
    if "link" in taken_away(row):
        # As the data sheet has it, with the assumed protocols of another network.
        port = cluster.levels[-1]
        other = load_cluster("dgx-a100").levels[-1]
        other = replace(other, bandwidth=port.bandwidth, shared_by=port.shared_by)
        cluster = replace(cluster, levels=(*cluster.levels[:-1], other))
    if machine.pair is not None:
        cluster = replace(
            cluster,
            levels=(
                replace(cluster.levels[0], peer_bandwidth=machine.pair, wiring=None),
                *cluster.levels[1:],
            ),
        )
    if "NVLS off" not in row["notes"]:
        return cluster
    return without_features(cluster)


def _measured(row: Mapping[str, str], kind: str, size: float, ranks: int) -> float:
    if row["time_us"]:
        return float(row["time_us"]) * 1e-6
    if row["busbw_GBps"]:
        return size * bus_factor(kind, ranks) / (float(row["busbw_GBps"]) * 1e9)
    # This tool's throughput counts every byte of an all-reduce twice, once for each pass.
    twice = 2 if row["tool"] == "all_reduce_bench.py" else 1
    return size * twice / (float(row["algbw_GBps"]) * 1e9)
