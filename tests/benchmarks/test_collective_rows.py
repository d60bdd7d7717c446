"""Published rows of collectives: what a row measured, which cluster it stands for, and what is left
out.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from benchmarks.validating.collectives import LARGE, MACHINES, Point, scored, size_of

A100 = "DGX/HGX A100-SXM 8-GPU node (NVLink3)"
EMPTY = {
    "collective": "all_reduce",
    "machine": A100,
    "gpus": "8",
    "nodes": "1",
    "size_bytes": "1000000",
    "busbw_GBps": "",
    "algbw_GBps": "",
    "time_us": "",
    "tool": "nccl-tests",
    "notes": "",
}


def point(**changes: str) -> Point:
    ((only,),) = [group.points for group in scored([EMPTY | changes]).values()]
    return only


def left_out(**changes: str) -> Mapping[str, int]:
    return scored([EMPTY | changes])["left out"].left_out


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        ({"time_us": "50", "busbw_GBps": "1"}, 50e-6),
        ({"busbw_GBps": "175"}, 1e-5),
        ({"busbw_GBps": "87.5", "collective": "alltoall"}, 1e-5),
        ({"algbw_GBps": "100"}, 1e-5),
        ({"algbw_GBps": "200", "tool": "all_reduce_bench.py"}, 1e-5),
    ],
)
def test_seconds_of_a_row(changes: dict[str, str], measured: float) -> None:
    assert point(**changes).measured == pytest.approx(measured)


def test_sizes() -> None:
    assert size_of("large (unstated)") == LARGE
    assert size_of("4GB (script default)") == 4e9
    assert size_of("1048576") == 2**20


def test_the_cluster_follows_the_row() -> None:
    h200 = {"machine": "8x H200 node (NVLink4)", "busbw_GBps": "400", "size_bytes": str(2**34)}
    assert point(**h200).predicted < point(**h200, notes="Ring, NVLS off").predicted
    p4de = {"machine": "AWS p4de.24xlarge (8x A100-80 + 4x100Gb EFA)", "time_us": "100"}
    within = point(**p4de)
    across = point(**p4de, gpus="16", nodes="2")
    alone = point(**p4de, gpus="2", nodes="2")
    assert within.predicted < alone.predicted < 10 * across.predicted
    several = point(
        machine="DGX A100 8x200Gb (multi-node)",
        gpus="multi",
        nodes="multi",
        busbw_GBps="192",
        size_bytes="large (unstated)",
    )
    assert several.label == f"all_reduce of {LARGE} B on 32 GPUs"


def test_what_is_left_out() -> None:
    assert left_out(size_bytes="profiler default (unstated)") == {
        "the size is the tool's default, which the source does not state": 1
    }
    assert left_out(collective="overlap_slowdown") == {"overlap_slowdown is not a collective": 1}
    assert left_out(machine="a new one") == {"no preset for a new one": 1}
    assert left_out(gpus="") == {"the ranks on each node are not stated": 1}
    assert left_out(gpus="9", nodes="2") == {"the ranks on each node are not stated": 1}
    assert left_out() == {"it states no time": 1}


def test_one_cluster_a_machine() -> None:
    assert len({machine.cluster for machine in MACHINES if "A100 node" in machine.name}) == 1
