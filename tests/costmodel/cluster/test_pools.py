"""Clusters of several pools, parts of a cluster, messages between stages, and sizes up to 131,072
devices.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel import (
    Cluster,
    Level,
    bind_axes,
    collective_time,
    crossing,
    dump,
    join,
    lines,
    load_cluster,
    presets,
    send_seconds,
)
from autopar.costmodel.cluster.source import Source
from autopar.costmodel.device.kernel_seconds import large_product_rate
from autopar.errors import ClusterError
from autopar.report.clusters import show_parts
from autopar.sharding import factorisations

BETWEEN = Level(name="between", size=1, latency=2e-5, bandwidth=12.5e9, shared_by=8)
MIXED = """
name: mixed
pools:
  - {cluster: dgx-a100, devices: 16}
  - {cluster: dgx-h100, devices: 8}
between:
  latency: {value: 20, unit: us, source: assumed}
  bandwidth: {value: 100, unit: Gbit/s}
  shared_by: 8
"""


def mixed() -> Cluster:
    return join(
        "mixed", [load_cluster("dgx-a100").sized(16), load_cluster("dgx-h100")], between=BETWEEN
    )


def three_levels(devices: int) -> Cluster:
    return load_cluster("grand-teton").sized(devices)


def test_a_file_of_pools(tmp_path: Path) -> None:
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED, encoding="utf-8")
    cluster = load_cluster(path)
    assert (cluster.name, cluster.devices, cluster.starts) == ("mixed", 24, (0, 16))
    assert cluster.pools == (load_cluster("dgx-a100").sized(16), load_cluster("dgx-h100"))
    assert cluster.levels[-1].bandwidth == 12.5e9
    assert cluster.sources == {"between.latency": Source(text="assumed", kind="assumed")}
    again = tmp_path / "again.json"
    again.write_text(dump(cluster), encoding="utf-8")
    assert load_cluster(again) == cluster


def test_pools_of_files_and_written_out(tmp_path: Path) -> None:
    (tmp_path / "own.json").write_text(dump(load_cluster("p4d").sized(24)), encoding="utf-8")
    inline = json.loads(dump(load_cluster("rtx4090")))
    data = {
        "name": "three",
        "pools": [
            {"cluster": "own.json"},
            {"cluster": inline, "devices": 2},
            {"cluster": "p5", "devices": 4},
        ],
    }
    path = tmp_path / "three.json"
    path.write_text(
        json.dumps({**data, "between": {"name": "wan", "latency": 1e-3, "bandwidth": 1e9}}),
        encoding="utf-8",
    )
    cluster = load_cluster(path)
    assert [pool.devices for pool in cluster.pools] == [24, 2, 4]
    assert cluster.inventory == "24 x A100-SXM4-40GB + 2 x RTX 4090 + 4 x H100-SXM5-80GB"
    assert cluster.units == (2, 30), "nodes of 8, 2 and 4 devices have blocks of 2 in common"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("dgx-h100", "dgx-h10", "pools.1.cluster: unknown cluster 'dgx-h10'"),
        (
            "dgx-h100",
            "../other.json",
            "pools.1.cluster: '../other.json' is not a file of the same folder",
        ),
        ("dgx-h100", "absent.json", "cannot be read"),
        ("dgx-h100", "mixed.yaml", "device: Field required"),
        (
            "{cluster: dgx-h100, devices: 8}",
            "{cluster: {name: x}}",
            "pools.1.cluster is not a cluster file:\n  device: Field required",
        ),
        ("devices: 8", "devices: 0", "at least 1"),
        ("devices: 8", "count: 8", "pools.1.count: Extra inputs"),
        ("cluster: dgx-h100, devices: 8", "cluster: local-cpu", "different backends (nccl, gloo)"),
        ("  - {cluster: dgx-h100, devices: 8}\n", "", "pools: Tuple should have at least 2 items"),
        ("between:\n", "between:\n  name: nic\n", "needs a name of its own, not 'nic'"),
        ("  latency", "  size: 3\n  latency", "between.size: Extra inputs"),
    ],
)
def test_bad_pools(before: str, after: str, message: str, tmp_path: Path) -> None:
    assert before in MIXED
    path = tmp_path / "mixed.yaml"
    path.write_text(MIXED.replace(before, after), encoding="utf-8")
    with pytest.raises(ClusterError) as caught:
        load_cluster(path)
    assert message in str(caught.value)
    assert "mixed.yaml" in str(caught.value)


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    (tmp_path / "own.json").write_text(dump(load_cluster("p5")), encoding="utf-8")
    (inside / "own.json").symlink_to(tmp_path / "own.json")
    (inside / "mixed.yaml").write_text(MIXED.replace("dgx-h100", "own.json"), encoding="utf-8")
    with pytest.raises(ClusterError, match="not a file of the same folder"):
        load_cluster(inside / "mixed.yaml")


def test_pools_are_cut_from_the_last() -> None:
    cluster = mixed()
    assert [pool.devices for pool in cluster.sized(20).pools] == [16, 4]
    assert cluster.sized(24) is cluster
    first = cluster.sized(12)
    assert (first.name, first.joined, first.device, first.units) == (
        "mixed",
        (),
        load_cluster("dgx-a100").device,
        (6, 12),
    )
    with pytest.raises(
        ClusterError, match="has 16 x A100-SXM4-40GB \\+ 8 x H100-SXM5-80GB, not 25 devices"
    ):
        cluster.sized(25)


def test_any_number_of_devices_and_any_part_of_pools() -> None:
    cluster = mixed()
    for count in range(1, 25):
        assert (
            cluster.sized(count).devices
            == sum(pool.devices for pool in cluster.sized(count).pools)
            == count
        )
        for start in range(25 - count):
            part = cluster.part(start, count)
            assert part.devices == count
            inside = [cluster.pools[0]] * (start + count <= 16) + [cluster.pools[1]] * (start >= 16)
            assert part.device == (inside or [cluster])[0].device
            assert bind_axes(part, (count,)) is not None


def test_a_mesh_over_all_pools_has_what_every_device_can_do() -> None:
    fast = load_cluster("dgx-h100")
    small = replace(fast, device=replace(fast.device, memory_capacity=20 * 2.0**30))
    cluster = join("mixed", [load_cluster("dgx-a100").sized(16), small], between=BETWEEN)
    assert cluster.device.name == "A100-SXM4-40GB"
    assert cluster.units == (8, 24)
    assert bind_axes(cluster, (3, 8)) == ("between", "nvlink")
    for pool in cluster.pools:
        device = pool.device
        assert cluster.device.usable_memory <= device.usable_memory
        assert large_product_rate(cluster.device, "bfloat16") <= large_product_rate(
            device, "bfloat16"
        )
        assert (
            cluster.device.memory_bandwidth * cluster.device.memory_fraction
            <= device.memory_bandwidth * device.memory_fraction * 1.0001
        )
        assert cluster.level("nvlink").rate(8) <= pool.level("nvlink").rate(8)
    assert "float8" not in cluster.device.peak, "A100 has no float8"


@given(first=st.integers(1, 200), then=st.integers(1, 200))
def test_the_size_before_does_not_matter_to_a_cluster_that_grows(first: int, then: int) -> None:
    """A node of which 6 devices were in use has room for 8 still."""
    preset = load_cluster("dgx-h100")
    before = preset.sized(first)
    wanted = preset.sized(then)
    nodes = before.levels[-1].size
    actual = before.sized(then)
    if then > first or wanted.levels[-1].size <= nodes:
        assert actual == wanted
    else:
        assert (actual.devices, actual.levels) == (then, before.part(0, then).levels)


def test_a_cut_takes_no_nodes_that_are_not_there() -> None:
    nodes = load_cluster("dgx-h100").sized(24)
    assert [nodes.sized(n).units for n in (20, 21, 22, 16, 12, 7)] == [
        (4, 20),
        (7, 21),
        (2, 22),
        (8, 16),
        (6, 12),
        (7, 7),
    ]
    with pytest.raises(ClusterError, match="of 4 slots 4 cannot"):
        Level(name="nvlink", size=4, slots=4, latency=0, bandwidth=1)


def test_an_aligned_part_is_the_cluster_of_that_size() -> None:
    cluster = three_levels(8 * 384 * 4)
    for count in (1, 2, 4, 8, 16, 64, 3072, 6144):
        for start in (0, count, 3 * count if 4 * count <= cluster.devices else 0):
            part = cluster.part(start, count)
            assert part.units == cluster.sized(count).units
            assert [level.bandwidth for level in part.levels] == [
                level.bandwidth for level in cluster.levels
            ]
    assert cluster.part(0, cluster.devices) is cluster


def test_parts_by_example() -> None:
    cluster = load_cluster("dgx-h100").sized(32)
    assert [cluster.part(*ends).units for ends in ((0, 12), (12, 12), (5, 3), (5, 5), (8, 11))] == [
        (4, 12),
        (4, 12),
        (3, 3),
        (1, 5),
        (1, 11),
    ]
    assert mixed().part(16, 8) == load_cluster("dgx-h100")
    assert mixed().part(4, 4).device == load_cluster("dgx-a100").device
    across = mixed().part(8, 16)
    assert (across.units, across.levels[-1].name, across.joined) == ((8, 16), "between", ())
    for start, count in ((-1, 2), (0, 0), (30, 3)):
        with pytest.raises(ClusterError, match="there are no"):
            cluster.part(start, count)


@given(node=st.integers(1, 9), nodes=st.integers(1, 6), pods=st.integers(1, 4), data=st.data())
def test_blocks_of_a_part_lie_inside_units(
    node: int, nodes: int, pods: int, data: st.DataObject
) -> None:
    sizes = (node, nodes, pods)
    levels = tuple(
        Level(name=f"level{i}", size=size, latency=1e-6, bandwidth=1e9, shared_by=4)
        for i, size in enumerate(sizes)
    )
    base = load_cluster("dgx-h100")
    cluster = Cluster(name="any", device=base.device, levels=levels)
    start = data.draw(st.integers(0, cluster.devices - 1))
    count = data.draw(st.integers(1, cluster.devices - start))
    part = cluster.part(start, count)
    assert part.devices == count
    for level, unit, block in zip(part.levels, cluster.units, part.units, strict=True):
        inside = start // unit == (start + count - 1) // unit
        for first in range(start, start + count, block):
            assert first // unit == (first + block - 1) // unit, "a block crosses a unit"
        assert not inside or block == count
        # A device's share of a port is what it is with all devices of the cluster that the part may
        # hold at work.
        outside = cluster.level(level.name)
        held = part.units[part.levels.index(level)] // level.size
        real = unit // outside.size
        assert level.bandwidth / min(level.shared_by, held) == pytest.approx(
            outside.bandwidth / min(outside.shared_by, real, count)
        )


def test_a_part_of_a_host_does_not_get_the_whole_host() -> None:
    host = load_cluster("local-cpu").sized(8)
    assert host.part(0, 4).device == host.device
    assert host.sized(4).device.flops("float32") == pytest.approx(2 * host.device.flops("float32"))


@pytest.mark.parametrize("start", [0, 3, 8, 16, 20])
@pytest.mark.parametrize("stage", [1, 2, 4, 6, 8, 16])
def test_stages_meet_on_the_outermost_level_that_a_message_crosses(start: int, stage: int) -> None:
    levels = [
        Level(name=name, size=size, latency=0, bandwidth=1)
        for name, size in (("nvlink", 4), ("rack", 2), ("spine", 8))
    ]
    cluster = Cluster(name="any", device=load_cluster("dgx-h100").device, levels=tuple(levels))

    def joins(a: int, b: int) -> int:
        return next(i for i, unit in enumerate(cluster.units) if a // unit == b // unit)

    outermost = max(joins(start + i, start + stage + i) for i in range(stage))
    assert crossing(cluster, start, start + 2 * stage) == (cluster, cluster.levels[outermost].name)


def test_where_pools_meet() -> None:
    cluster = mixed()
    assert crossing(cluster, 0, 16) == (cluster.pools[0], "nic")
    assert crossing(cluster, 16, 24) == (cluster.pools[1], "nvlink")
    assert crossing(cluster, 12, 20) == (cluster, "between")
    assert crossing(cluster, 23, 24) == (cluster.pools[1], "device")


def test_messages_between_stages() -> None:
    cluster = mixed()
    nbytes = np.array([0.0, 8e6, 80e6])
    launch = cluster.device.launch
    assert send_seconds(cluster, nbytes, level="between") == pytest.approx(
        launch + 2e-5 + nbytes * 8 / 12.5e9
    )
    assert send_seconds(cluster, nbytes, level="between", senders=1) == pytest.approx(
        launch + 2e-5 + nbytes / 12.5e9
    )
    pool = cluster.pools[0]
    assert send_seconds(pool, nbytes, level="nic") == pytest.approx(
        collective_time("send", nbytes, 2, level="nic", cluster=pool)
    )
    assert (
        send_seconds(pool, 80e6, level="nvlink")
        < send_seconds(pool, 80e6, level="nic")
        < send_seconds(cluster, 80e6, level="between")
    )
    assert send_seconds(pool, nbytes, level="device") == pytest.approx(0.0)


@pytest.mark.parametrize("devices", [6, 7, 12, 24, 3072, 16384, 131072])
@pytest.mark.parametrize("name", presets())
def test_every_mesh_of_any_size_is_bound_and_priced(name: str, devices: int) -> None:
    cluster = load_cluster(name).sized(devices)
    kinds = (
        ("all_reduce", "all_gather", "all_to_all")
        if devices > 24
        else ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    )
    for sizes in factorisations(devices, 3):
        levels = bind_axes(cluster, sizes)
        assert levels is not None
        for size, level in zip(sizes, levels, strict=True):
            for kind in kinds:
                assert 0 < collective_time(kind, 1e6, size, level=level, cluster=cluster) < 1e4


def _steps(devices: int) -> int:
    """Lines of Python that pricing an all-reduce over all devices runs, nothing remembered."""
    cluster = three_levels(devices)
    (level,) = bind_axes(cluster, (devices,)) or ("",)
    counted = 0

    def count(frame: FrameType, event: str, argument: object) -> object:
        nonlocal counted
        counted += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        lines.__wrapped__("all_reduce", devices, level=level, cluster=cluster)
    finally:
        sys.settrace(before)
    return counted


def test_the_price_of_a_collective_takes_no_longer_with_more_ranks() -> None:
    assert 100 < _steps(3072 * 64) <= 1.1 * _steps(3072 * 2)


def test_pods_are_slower_to_leave() -> None:
    cluster = three_levels(24576)
    assert cluster.units == (8, 3072, 24576)
    inside, outside = (
        float(collective_time("all_to_all", 1e9, 8, level=level, cluster=cluster))
        for level in ("pod", "aggregation")
    )
    assert outside > 5 * inside, "seven devices share the bandwidth of one between pods"


def test_pools_are_shown() -> None:
    texts = [
        part if isinstance(part, str) else f"{part.title} {part.rows}"
        for part in show_parts(mixed())
    ]
    assert texts[0] == "cluster mixed: 24 devices in 2 pools, collectives by nccl"
    assert "16 to 23" in texts[1]
    assert "dgx-h100" in texts[1]
    assert "between" in texts[2]
    assert [text for text in texts if text.startswith("cluster dgx")] == [
        "cluster dgx-a100: 16 x A100-SXM4-40GB, collectives by nccl",
        "cluster dgx-h100: 8 x H100-SXM5-80GB, collectives by nccl",
    ]
