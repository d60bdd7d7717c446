"""Clusters: presets, files, sizes, and the levels that mesh axes span."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel import (
    Cluster,
    Level,
    bind_axes,
    default_cluster,
    dump,
    load_cluster,
    parse_span,
    presets,
)
from autopar.costmodel.calibration.intervals import kernel_interval
from autopar.costmodel.cluster.source import Source
from autopar.costmodel.device.kernel_seconds import large_product_rate
from autopar.costmodel.device.measured_kernels import SHEET
from autopar.errors import ClusterError
from autopar.ir import DTYPE_BYTES
from autopar.sharding import factorisations

NAMED = {
    "dgx-a100",
    "dgx-a100-80g",
    "dgx-h100",
    "hgx-h200",
    "dgx-b200",
    "p3.16xlarge",
    "p4d",
    "p5",
    "mi300x",
    "rtx4090",
}
NAMED |= {
    "grand-teton",
    "local-cpu",
    "dgx-b300",
    "gb200-nvl72",
    "gb300-nvl72",
    "l40s",
    "rtx-pro-6000",
    "l4",
    "g5",
}
SHEETS = {"mi300x", "mi325x", "mi355x", "tpu-v5p", "tpu-v6e", "trn2", "ascend-910b", "ascend-910c"}
"""Presets of devices of which only the data sheet is known."""
NAMED |= SHEETS

YAML = """
name: two-boxes
backend: gloo
device:
  name: box
  peak: {float32: {value: 50, unit: GFLOP/s, source: measured}, float64: 25e9}
  matmul_fraction: {value: 80, unit: "%"}
  half_size: 8
  memory_bandwidth: {value: 10, unit: GB/s}
  memory_fraction: 0.8
  memory_capacity: {value: 16, unit: GiB}
  launch: {value: 5, unit: us}
  reserved: 0
levels:
  - {name: loopback, size: 2, latency: {value: 180, unit: us}, bandwidth: {value: 2, unit: GB/s}}
  - {name: nic, size: 2, latency: 3e-4, bandwidth: {value: 1, unit: Gbit/s}, shared_by: 2,
     duplex: false}
"""


def test_the_presets_that_are_promised_exist() -> None:
    assert set(presets()) == NAMED


@pytest.mark.parametrize("name", sorted(NAMED))
def test_presets_are_complete(name: str) -> None:
    cluster = load_cluster(name)
    assert cluster.name == name
    assert cluster.device.usable_memory > 0
    for dtype in ("float64", "float32", "float16", "int64", "bool"):
        assert cluster.device.flops(dtype) > 0
    assert cluster.device.flops("float32") >= cluster.device.flops("float64")
    figures = {
        f"device.{field}" for field in ("memory_bandwidth", "memory_capacity", "launch", "reserved")
    }
    figures |= (
        {"device.kernels"}
        if cluster.device.kernels
        else {"device.matmul_fraction", "device.half_size"}
    )
    figures |= {f"device.peak.{family}" for family in cluster.device.peak}
    figures |= {
        f"{level.name}.{field}"
        for level in cluster.levels
        for field in ("latency", "bandwidth", "efficiency")
    }
    host = {
        "host_bandwidth": cluster.device.host_bandwidth,
        "host_memory": cluster.device.host_memory,
    }
    figures |= {f"device.{name}" for name, value in host.items() if value is not None}
    assert (host["host_bandwidth"] or 0) < cluster.device.memory_bandwidth
    assert figures <= set(cluster.sources), "every figure of a preset says where it comes from"


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("devices", [1, 2, 6, 7, 11, 12, 1024, 3072])
def test_any_number_of_devices(name: str, devices: int) -> None:
    preset = load_cluster(name)
    cluster = preset.sized(devices)
    assert cluster.devices == devices
    assert all(
        now <= before for now, before in zip(cluster.units[:-1], preset.units[:-1], strict=True)
    )


@pytest.mark.parametrize("name", sorted(SHEETS))
def test_devices_by_their_data_sheet_have_every_kernel_and_no_figure_of_another(name: str) -> None:
    cluster = load_cluster(name)
    device = cluster.device
    kernels = device.kernels
    assert kernels is not None and kernels.name == SHEET
    assert (kernels.memory, kernels.units) == (device.memory_bandwidth, device.units)
    assert set(kernels.generations) == {"flash1", "flash2", "flash3", "cudnn"}
    for dtype in ("bfloat16", "float16", "float32"):
        assert 0 < large_product_rate(device, dtype) < device.flops(dtype)
    assert kernel_interval(cluster, "products", "bfloat16").rows > 1000
    for said in cluster.sources.values():
        assert said.text


def test_a_data_sheet_without_units_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "boxes.yaml"
    text = YAML.replace('  matmul_fraction: {value: 80, unit: "%"}\n  half_size: 8\n', "")
    path.write_text(text.replace("  name: box\n", "  name: box\n  kernels: data-sheet\n"))
    with pytest.raises(ClusterError, match="device 'box': kernels by data-sheet need units"):
        load_cluster(path)


def test_sizes_fill_nodes_evenly() -> None:
    cluster = load_cluster("dgx-h100")
    assert [cluster.sized(n).units for n in (7, 8, 11, 12, 3072)] == [
        (7, 7),
        (8, 8),
        (1, 11),
        (6, 12),
        (8, 3072),
    ]
    with pytest.raises(ClusterError, match="at least 1"):
        cluster.sized(0)


def test_ranks_of_one_host_divide_it() -> None:
    two = load_cluster("local-cpu")
    eight = two.sized(8)
    assert eight.devices * eight.device.flops("float32") == pytest.approx(
        two.devices * two.device.flops("float32")
    )
    assert eight.devices * eight.device.memory_capacity == pytest.approx(
        two.devices * two.device.memory_capacity
    )
    assert eight.levels[0].bandwidth == pytest.approx(two.levels[0].bandwidth / 4)
    assert eight.levels[0].latency == two.levels[0].latency


def test_dtypes_without_a_figure_are_errors() -> None:
    device = load_cluster("p3.16xlarge").device
    assert device.flops("complex64") == device.flops("float32")
    with pytest.raises(ClusterError, match="has no peak FLOP/s for bfloat16; it has float16"):
        device.flops("bfloat16")
    with pytest.raises(ClusterError, match="Perhaps you meant 'float32'"):
        device.flops("float23")
    everything = load_cluster("dgx-h100").device
    assert all(everything.flops(dtype) > 0 for dtype in DTYPE_BYTES)


def test_yaml_file(tmp_path: Path) -> None:
    path = tmp_path / "boxes.yaml"
    path.write_text(YAML, encoding="utf-8")
    cluster = load_cluster(path)
    assert (cluster.devices, cluster.backend, cluster.device.memory_capacity) == (
        4,
        "gloo",
        16 * 2**30,
    )
    assert cluster.device.peak == {"float32": 50e9, "float64": 25e9}
    assert cluster.device.matmul_fraction == pytest.approx(0.8)
    nic = cluster.level("nic")
    assert (nic.bandwidth, nic.rate(2), nic.shared_by, nic.latency) == (125e6, 62.5e6, 2, 3e-4)
    assert cluster.sources == {"device.peak.float32": Source(text="measured", kind="measured")}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_dump_and_load(name: str, tmp_path: Path) -> None:
    cluster = load_cluster(name).sized(24)
    path = tmp_path / "cluster.json"
    path.write_text(dump(cluster), encoding="utf-8")
    assert load_cluster(path) == cluster


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("half_size: 8", "half_sise: 8", "half_sise: Extra inputs"),
        (
            "  half_size: 8\n",
            "",
            "device.half_size: Field required where no kernels are given; a100_sxm",
        ),
        (
            "reserved: 0",
            "reserved: {value: 1, unit: GFLOP/s}",
            "device.reserved: unknown unit 'GFLOP/s': valid are B",
        ),
        ("reserved: 0", "reserved: .inf", "finite"),
        ("reserved: 0", "reserved: 1e12", "nothing is left"),
        ("reserved: 0", "reserved: true", "device.reserved"),
        ("launch: {value: 5, unit: us}", "launch: -1", "launch is -1.0"),
        ("float64: 25e9", "float46: 25e9", "unknown dtype family 'float46'"),
        ("float64: 25e9", "float64: 0", "peak of float64 is 0.0"),
        ("memory_fraction: 0.8", "memory_fraction: 8", "at most 1"),
        ("backend: gloo", "backend: glue", "unknown backend 'glue'"),
        ("name: nic, size: 2", "name: nic, size: 0", "at least 1"),
        ("name: nic, size: 2", "name: loopback, size: 2", "distinct names"),
        ("name: nic, size: 2", "name: device, size: 2", "one word"),
        ("name: nic, size: 2", "name: nic, features: [magic], size: 2", "unknown feature 'magic'"),
        ("name: two-boxes", "name: [", "is not YAML"),
        ("name: two-boxes", "version: 2\nname: two-boxes", "version"),
    ],
)
def test_bad_files(before: str, after: str, message: str, tmp_path: Path) -> None:
    assert before in YAML
    path = tmp_path / "bad.yml"
    path.write_text(YAML.replace(before, after), encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        load_cluster(path)
    assert message in str(caught.value)
    assert "bad.yml" in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "asked"),
    [
        (
            "name: loopback, size: 2",
            "name: nvlink, size: 2",
            "nvlink.bandwidth is 2 GB/s: is that its unit? Such links have 10 GB/s to",
        ),
        (
            "bandwidth: {value: 1, unit: Gbit/s}",
            "bandwidth: {value: 1, unit: MB/s}",
            "nic.bandwidth is 1 MB/s",
        ),
        (
            "bandwidth: {value: 2, unit: GB/s}",
            "bandwidth: {value: 450e6, unit: GB/s}",
            "loopback.bandwidth is 4.5e+05 TB/s",
        ),
        ("latency: 3e-4", "latency: {value: 300, unit: s}", "nic.latency is 300 s"),
        ("float64: 25e9", "float64: 25", "device.peak.float64 is 25 FLOP/s"),
        (
            "memory_capacity: {value: 16, unit: GiB}",
            "memory_capacity: 16",
            "device.memory_capacity is 16 B",
        ),
    ],
)
def test_implausible_figures_are_asked_back(
    before: str, after: str, asked: str, tmp_path: Path
) -> None:
    assert before in YAML
    path = tmp_path / "slip.yaml"
    path.write_text(YAML.replace(before, after), encoding="utf-8")
    with pytest.raises(ClusterError, match=re.escape(asked)) as caught:
        load_cluster(path)
    assert '"unusual": true' in str(caught.value)


def test_an_unusual_figure_that_is_meant_is_taken_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "slow.yaml"
    slow = (
        "name: nvlink, size: 2, latency: {value: 180, unit: us}, bandwidth: {value: 2, unit: MB/s, "
        "unusual: true}"
    )
    path.write_text(re.sub("name: loopback.*GB/s}", slow, YAML), encoding="utf-8")
    cluster = load_cluster(path)
    assert cluster.levels[0].bandwidth == 2e6
    again = tmp_path / "again.json"
    again.write_text(dump(cluster), encoding="utf-8")
    assert load_cluster(again) == cluster


def test_levels_take_what_known_links_have() -> None:
    cluster = load_cluster("p5")
    assert cluster.level("nvlink") == load_cluster("dgx-h100").level("nvlink")
    # EFA was measured on p4d: here it is assumed, with a port for each device.
    nic = cluster.level("nic")
    measured = load_cluster("p4d").level("nic")
    assert [p.overhead for p in nic.protocols] == [p.overhead for p in measured.protocols]
    assert (nic.shared_by, measured.shared_by) == (1, 2)
    sources = [
        source
        for where, source in cluster.sources.items()
        if where.startswith("nic.") and not where.endswith(".bandwidth")
    ]
    assert sources and all(source.kind == "assumed" and source.error is None for source in sources)
    fitted = load_cluster("p4d").sources["nic.simple.efficiency"]
    assert (
        fitted.kind == "fitted"
        and fitted.rows == 29
        and str(fitted).startswith("fitted: all-reduce on 2 x 8 GPUs")
    )


def test_unknown_links(tmp_path: Path) -> None:
    path = tmp_path / "links.yaml"
    path.write_text(
        re.sub("  - {name: loopback.*", "  - {name: nvlink, size: 2, links: nvlink-h10}", YAML),
        encoding="utf-8",
    )
    with pytest.raises(
        ClusterError,
        match=r"unknown links 'nvlink-h10': valid are .* Perhaps you meant 'nvlink-h100'",
    ):
        load_cluster(path)


def test_files_that_are_no_cluster(tmp_path: Path) -> None:
    cases = {
        "large.json": b" " * (1 << 20) + b"{}",
        "binary.json": b"\xff\xfe\x00",
        "deep.json": b"[" * 100_000,
        "number.json": b"7",
        "empty.yaml": b"",
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ClusterError, match=name):
            load_cluster(tmp_path / name)
    with pytest.raises(ClusterError, match="cannot be read"):
        load_cluster(tmp_path / "absent.json")
    with pytest.raises(ClusterError, match="Perhaps you meant 'dgx-h100'"):
        load_cluster("dgx-h10")


@given(st.binary(max_size=200))
def test_any_bytes_load_or_are_refused(content: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for suffix in ("json", "yaml"):
            path = Path(folder) / f"any.{suffix}"
            path.write_bytes(content)
            with pytest.raises(ClusterError):
                load_cluster(path)


def test_preset_files_hold_no_plain_numbers() -> None:
    folder = Path(__file__).resolve().parents[3] / "costmodel" / "presets"
    for path in sorted(folder.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        for level in data["levels"]:
            figures = {**data["device"], **data["device"]["peak"]}
            figures |= {
                key: value
                for key, value in level.items()
                if key not in ("size", "shared_by", "duplex")
            }
            assert not [value for value in figures.values() if isinstance(value, int | float)], (
                f"{path.name}: unit and source are missing"
            )


def _members(cluster: Cluster, ranks: tuple[int, ...]) -> list[tuple[int, ...]]:
    """By brute force: for each level from the devices on, how many of the ranks each unit that they
    touch holds.
    """
    return [tuple(Counter(rank // unit for rank in ranks).values()) for unit in (1, *cluster.units)]


@pytest.mark.parametrize("devices", [8, 12, 16, 24, 48, 64])
def test_bound_levels_are_those_the_groups_cross(devices: int) -> None:
    inner = Level(name="nvlink", size=4, latency=0, bandwidth=1)
    rack = Level(name="rack", size=2, latency=0, bandwidth=1)
    spine = Level(name="spine", size=1, latency=0, bandwidth=1)
    cluster = replace(load_cluster("dgx-h100"), levels=(inner, rack, spine)).sized(devices)
    names = [level.name for level in cluster.levels]
    for sizes in factorisations(devices, 3):
        bound = bind_axes(cluster, sizes)
        assert bound is not None
        for axis, text in enumerate(bound):
            stride = math.prod(sizes[axis + 1 :])
            starts = [rank for rank in range(devices) if (rank // stride) % sizes[axis] == 0]
            groups = [tuple(start + i * stride for i in range(sizes[axis])) for start in starts]
            members = [_members(cluster, group) for group in groups]
            counts = [[len(held) for held in level] for level in members]
            if all(
                level == members[0] and all(len(set(held)) == 1 for held in level)
                for level in members
            ):
                expected = [
                    (name, a // b)
                    for name, (a, b) in zip(names, itertools.pairwise(counts[0]), strict=True)
                    if a > b
                ]
                assert [
                    (level.name, n) for level, n in parse_span(cluster, text, sizes[axis])
                ] == expected
            else:
                outermost = max(
                    max(i for i, (a, b) in enumerate(itertools.pairwise(count)) if a > b)
                    for count in counts
                )
                assert text == names[outermost]


def test_bind_axes_by_example() -> None:
    cluster = load_cluster("dgx-h100").sized(64)
    assert bind_axes(cluster, (8, 8)) == ("nic", "nvlink")
    assert bind_axes(cluster, (4, 16)) == ("nic", "nvlink:8+nic:2")
    assert bind_axes(cluster, (64, 1)) == ("nvlink:8+nic:8", "device")
    assert bind_axes(cluster, (8, 2, 4)) == ("nic", "nvlink", "nvlink")
    assert bind_axes(cluster, (7, 9)) is None
    assert bind_axes(cluster.sized(12), (3, 4)) == ("nic", "nic")
    assert bind_axes(cluster.sized(1), ()) == ()


@pytest.mark.parametrize(
    ("text", "group"),
    [("nvlink:8+nic:2", 8), ("nvlink:x", 8), ("ring", 8), ("nvlink:8+ring:2", 16), ("device", 8)],
)
def test_spans_that_do_not_fit(text: str, group: int) -> None:
    with pytest.raises(ClusterError):
        parse_span(load_cluster("dgx-h100"), text, group)


def test_default_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(text: str) -> None:
        done: subprocess.CompletedProcess[str] = subprocess.CompletedProcess(
            [], 0, stdout=text, stderr=""
        )
        monkeypatch.setattr(shutil, "which", lambda tool: f"/bin/{tool}")
        monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)

    answer("NVIDIA A100-SXM4-80GB, 81920\n" * 4)
    cluster, sentence = default_cluster()
    assert (cluster.name, cluster.devices) == ("dgx-a100-80g", 4)
    assert "4 x NVIDIA A100-SXM4-80GB" in sentence
    answer("NVIDIA A100-SXM4-40GB, 40960\n")
    assert default_cluster()[0].name == "dgx-a100"
    answer("NVIDIA H200, 143771\n" * 8)
    assert default_cluster()[0].name == "hgx-h200"
    answer("NVIDIA GB200, 189471\n" * 4)
    assert (default_cluster()[0].name, default_cluster()[0].devices) == ("gb200-nvl72", 4)
    for gpu, preset in (("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("NVIDIA A10G", "g5")):
        answer(f"{gpu}, 23034\n")
        assert default_cluster()[0].name == preset, "a whole word names a GPU"
    answer("Voodoo 2, 12\n")
    cluster, sentence = default_cluster()
    assert (cluster.name, cluster.devices) == ("dgx-h100", 1)
    assert "no preset describes" in sentence
    answer("No devices were found\n")
    assert "no GPU was found" in default_cluster()[1]
    monkeypatch.setattr(shutil, "which", lambda tool: None)
    cluster, sentence = default_cluster()
    assert (cluster.name, cluster.devices) == ("dgx-h100", 8)
    assert "dgx-h100" in sentence
