"""Operators profiled inside layers: the sizes that follow from their bytes, what is left out, and
links from profiled collectives.
"""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from autopar.costmodel import collective_time, load_cluster
from autopar.costmodel.device.kernel_seconds import product_seconds
from autopar.costmodel.device.measured_kernels import kernels_of
from autopar.costmodel.device.products import Product
from autopar.errors import UsageError
from benchmarks.fitting.profiled_links import NODES, node_file
from benchmarks.kernels.profiles import products, streams

HIDDEN = 4096
SEQUENCE = 2048
MIB = 2**20


def line(
    op: str,
    *,
    tp: int = 1,
    algo: int = 0,
    weights: float = 0.0,
    activations: float = 0.0,
    microseconds: float = 1000.0,
) -> dict[str, str]:
    sizes = {
        "weights_MB": f"{weights / MIB:.3f}",
        "activations_MB": f"{activations / MIB:.3f}",
        "fwd_us": f"{microseconds}",
    }
    return {"gpu": "L4-24GB", "op": op, "tp": str(tp), "algo": str(algo), **sizes}


def write(folder: Path, name: str, rows: list[dict[str, str]]) -> None:
    with gzip.open(folder / name, "wt", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def test_sizes_follow_from_bytes(tmp_path: Path) -> None:
    wide = 4 * HIDDEN * HIDDEN * 2
    rows = [
        line("enc-MLP-GEMM-1", weights=wide, activations=SEQUENCE * 4 * HIDDEN * 2),
        line("enc-MLP-GEMM-1", tp=4, weights=wide / 4, activations=SEQUENCE * HIDDEN * 2),
        line("enc-MLP-GEMM-2", weights=wide, activations=3 * SEQUENCE * HIDDEN * 2),
        line("enc-attention-dense", weights=wide / 4, activations=SEQUENCE * HIDDEN * 2),
        line(
            "enc-MLP-GEMM-1", tp=2, algo=1, weights=wide / 2, activations=1.0
        ),  # split by rows: holds an all-reduce
        line("enc-MLP-GEMM-2", tp=2, weights=wide / 2, activations=1.0),  # likewise
        line("enc-attention-qkv", weights=3 * HIDDEN * HIDDEN * 2, activations=1.0),  # with a copy
        line("enc-MLP-GEMM-1", weights=wide, activations=1.0, microseconds=0.0),
    ]
    write(tmp_path, "mist_ops.csv.gz", rows)
    actual = products(tmp_path, "L4-24GB")
    sizes = [tuple(int(row[name]) for name in "mnk") for row in actual.rows]
    h = HIDDEN
    s = SEQUENCE
    assert sizes == [(s, 4 * h, h), (s, h, h), (3 * s, h, 4 * h), (s, h, h)]
    assert actual.seconds.tolist() == [1e-3] * 4 and actual.fold[1] == actual.fold[3], (
        "a shape is in one fold, whoever ran it"
    )
    with pytest.raises(UsageError, match=r"has no table mist_ops\.csv\.gz"):
        products(tmp_path / "empty", "L4-24GB")


def test_streams_count_what_they_move_and_leave_out_what_a_cache_holds(tmp_path: Path) -> None:
    kept = 96 * MIB
    rows = [
        line("enc-MLP-gelu", activations=kept),
        line("enc-attention-dropout", activations=kept),
        line("enc-MLP-gelu", activations=MIB),
        line("enc-MLP-gelu", algo=1, activations=kept),
        line("enc-1st-layernorm", activations=kept),
    ]
    write(tmp_path, "mist_ops.csv.gz", rows)
    assert streams(tmp_path, "L4-24GB").numbers("bytes").tolist() == pytest.approx(
        [2 * kept, 2.5 * kept / 1.5]
    )


def test_links_are_fitted_to_all_reduces_and_messages(tmp_path: Path) -> None:
    rate = 5e9
    overhead = 2e-4
    column = "busbw_GBps_if_data_is_the_full_buffer"
    rows = [
        {
            "gpu": "L4-24GB",
            "op": "all_reduce",
            "gpus": str(n),
            "data_MB": str(size),
            column: "",
            "seconds": repr(overhead + size * MIB * 2 * (n - 1) / n / rate),
        }
        for n in (2, 4, 8)
        for size in (1, 3, 10, 40, 100, 400, 1000)
    ]
    rows.append(
        {
            "gpu": "L4-24GB",
            "op": "p2p_intra_node",
            "gpus": "2",
            "data_MB": "64",
            "seconds": "0",
            column: "9.6",
        }
    )
    write(tmp_path, "mist_collectives.csv.gz", rows)
    made = node_file(tmp_path, NODES[0])
    simple, sends = made["protocols"]
    assert simple["efficiency"]["value"] * NODES[0].bandwidth == pytest.approx(rate, rel=0.01)
    assert simple["overhead"]["value"] == pytest.approx(200, rel=0.02)
    assert sends["efficiency"]["value"] == pytest.approx(0.3)
    left = made["residuals"]["all_reduce from 1 MiB"]
    assert abs(left["low"]) < 0.01 and abs(left["high"]) < 0.01
    assert made["efficiency"]["error"] < 0.01 and made["efficiency"]["rows"] + left["rows"] == 21


@pytest.mark.parametrize(
    ("preset", "name", "reached"),
    [
        ("l4", "l4", (0.3, 0.6)),
        ("g5", "a10g", (0.8, 1.0)),
        ("p3.16xlarge", "v100_sxm2", (0.6, 0.8)),
    ],
)
def test_profiled_devices_are_priced_by_their_products(
    preset: str, name: str, reached: tuple[float, float]
) -> None:
    device = load_cluster(preset).device
    assert device.kernels is kernels_of(name)
    sides = [np.array([float(side)]) for side in (1, 8192, 16384, 4096)]
    seconds = float(
        product_seconds(
            Product(batch=sides[0], m=sides[1], n=sides[2], k=sides[3]),
            "float16",
            device,
            itemsize=2,
        )[0]
    )
    assert reached[0] < 2 * 8192 * 16384 * 4096 / seconds / device.flops("float16") < reached[1]
    assert (
        product_seconds(
            Product(batch=sides[0], m=sides[1], n=sides[2], k=sides[3]),
            "float32",
            device,
            itemsize=4,
        )[0]
        > 1.5 * seconds
    )


def test_a_quad_of_v100_has_four_of_six_links() -> None:
    """All-reduces profiled on 2, 4 and 8 neighbours reach 20, 77 and 127 GB/s (Dazz993/Mist)."""
    cluster = load_cluster("p3.16xlarge")
    for group, measured in ((2, 20.1e9), (4, 77.1e9), (8, 127e9)):
        size = 2.0**29
        level = "nvlink" if group == 8 else f"nvlink:{group}"
        seconds = float(collective_time("all_reduce", size, group, level=level, cluster=cluster))
        assert size * 2 * (group - 1) / group / seconds == pytest.approx(measured, rel=0.08)
