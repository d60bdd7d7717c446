"""Collectives: closed forms on one level, shared ports, several levels, and what holds for every kind."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel import KINDS, Cluster, Level, bind_axes, collective_time, linear, lines, load_cluster
from autopar.costmodel.collectives import TABLE
from autopar.errors import ClusterError

GB = 1e9
DEVICE = replace(load_cluster("dgx-a100").device, launch=0.0)


def one_level(size: int, backend: str = "nccl", **changes: object) -> Cluster:
    """`size` devices on links of 1 GB/s without latency, unless changed."""
    level = Level(name="link", size=size, latency=0.0, bandwidth=GB)
    return Cluster(name="test", device=DEVICE, levels=(replace(level, **changes),), backend=backend)  # type: ignore[arg-type]


def seconds(kind: str, nbytes: float, group: int, cluster: Cluster, level: str = "link") -> float:
    return float(collective_time(kind, nbytes, group, level=level, cluster=cluster))


@pytest.mark.parametrize(
    ("backend", "kind", "group", "expected"),
    [
        ("nccl", "all_reduce", 2, 1.2),
        ("nccl", "all_reduce", 10, 2.16),
        ("nccl", "all_gather", 10, 1.08),
        ("nccl", "reduce_scatter", 10, 1.08),
        ("nccl", "all_to_all", 10, 1.08),
        ("nccl", "broadcast", 10, 1.2),
        ("nccl", "reduce", 10, 1.2),
        ("nccl", "gather", 4, 0.9),
        ("nccl", "scatter", 4, 0.9),
        ("nccl", "send", 4, 1.2),
        ("nccl", "barrier", 4, 0.0),
        ("gloo", "all_reduce", 4, 1.8),
        ("gloo", "all_gather", 4, 0.9),
        ("gloo", "reduce_scatter", 4, 1.8),
        ("gloo", "all_to_all", 4, 0.9),
        ("gloo", "broadcast", 4, 2.4),
        ("gloo", "reduce", 4, 1.8),
    ],
)
def test_bytes_of_1_2_gb_at_1_gb_per_second(backend: str, kind: str, group: int, expected: float) -> None:
    assert seconds(kind, 1.2 * GB, group, one_level(group, backend)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("backend", "kind", "group", "steps"),
    [
        ("nccl", "all_reduce", 2, 2),
        ("nccl", "all_reduce", 16, 8),
        ("nccl", "all_gather", 16, 15),
        ("nccl", "all_to_all", 9, 1),
        ("nccl", "all_to_all", 17, 2),
        ("nccl", "barrier", 5, 6),
        ("gloo", "all_reduce", 4, 6),
        ("gloo", "reduce_scatter", 4, 6),
        ("gloo", "all_to_all", 4, 1),
        ("gloo", "broadcast", 5, 3),
        ("gloo", "barrier", 8, 3),
    ],
)
def test_steps_of_an_empty_message(backend: str, kind: str, group: int, steps: int) -> None:
    assert seconds(kind, 0, group, one_level(group, backend, latency=1e-5)) == pytest.approx(steps * 1e-5)


def test_all_reduce_takes_the_tree_for_small_and_the_ring_for_large_messages() -> None:
    found = lines("all_reduce", 16, level="link", cluster=one_level(16, latency=1e-5))
    assert [round(alpha * 1e5) for alpha, _ in found] == [8, 30]
    assert found[0][1] > found[1][1] == pytest.approx(2 * 15 / 16 / GB, rel=1e-9, abs=0)
    assert linear("all_reduce", 16, level="link", cluster=one_level(16, latency=1e-5)) == found[-1]


def test_reduction_in_the_switch_beats_the_ring() -> None:
    plain, switch = one_level(8), one_level(8, features=("in_switch",))
    assert seconds("all_reduce", GB, 8, switch) < seconds("all_reduce", GB, 8, plain)
    assert seconds("all_gather", GB, 8, switch) == seconds("all_gather", GB, 8, plain)


def test_half_duplex_halves_and_pairwise_links_bound_the_rate() -> None:
    assert seconds("all_gather", GB, 2, one_level(2, duplex=False)) == pytest.approx(1.0)
    mesh = one_level(8, peer_bandwidth=GB / 7)
    assert seconds("all_gather", GB, 8, mesh) == pytest.approx(7 / 8)
    assert seconds("all_gather", GB, 2, mesh) == pytest.approx(7 / 2)


def two_levels(*, shared_by: int = 1, backend: str = "nccl") -> Cluster:
    """4 nodes of 8 devices: 10 GB/s inside, 1 GB/s a port between."""
    inner = Level(name="nvlink", size=8, latency=1e-6, bandwidth=10 * GB)
    outer = Level(name="nic", size=4, latency=1e-5, bandwidth=GB, shared_by=shared_by)
    return Cluster(name="test", device=DEVICE, levels=(inner, outer), backend=backend)


def test_groups_that_share_a_port_divide_it() -> None:
    across = bind_axes(two_levels(), (4, 8))
    assert across == ("nic", "nvlink")
    alone = linear("all_gather", 4, level="nic", cluster=two_levels())[1]
    assert linear("all_gather", 4, level="nic", cluster=two_levels(shared_by=8))[1] == pytest.approx(8 * alone, rel=1e-9, abs=0)
    # With one device a node there is nobody to share with.
    thin = replace(two_levels(shared_by=8), levels=(replace(two_levels().levels[0], size=1), two_levels(shared_by=8).levels[1]))
    assert linear("all_gather", 4, level="nic", cluster=thin)[1] == pytest.approx(alone, rel=1e-9, abs=0)


def test_over_two_levels_each_device_carries_its_share_outside() -> None:
    cluster = two_levels()
    text = "nvlink:8+nic:4"
    # Outside: 3/4 of 1/8 of the bytes at 1 GB/s; inside: 7/8 of the bytes at 10 GB/s. The slower bounds it.
    assert linear("all_gather", 32, level=text, cluster=cluster) == pytest.approx((7e-6 + 3e-5, max(3 / 32, 7 / 80) / GB), rel=1e-9, abs=0)
    assert linear("all_reduce", 32, level=text, cluster=cluster)[1] == pytest.approx(2 * 3 / 32 / GB, rel=1e-9, abs=0)
    # An all-to-all sends 24 of 32 parts outside through the device's own port.
    assert linear("all_to_all", 32, level=text, cluster=cluster)[1] == pytest.approx(24 / 32 / GB, rel=1e-9, abs=0)


def test_gloo_runs_one_ring_over_all_levels() -> None:
    cluster = two_levels(backend="gloo", shared_by=8)
    expected = (62 * 1e-5, 2 * 31 / 32 / GB)
    assert linear("all_reduce", 32, level="nvlink:8+nic:4", cluster=cluster) == pytest.approx(expected, rel=1e-9, abs=0)
    # Four groups of two members a node share each NIC.
    assert linear("all_gather", 8, level="nvlink:2+nic:4", cluster=cluster)[1] == pytest.approx(4 * 7 / 8 / GB, rel=1e-9, abs=0)


@pytest.mark.parametrize("backend", TABLE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_every_backend(backend: str, kind: str) -> None:
    cluster = two_levels(backend=backend)
    assert seconds(kind, GB, 1, cluster, "device") == 0
    for group, level in ((8, "nvlink"), (4, "nic"), (32, "nvlink:8+nic:4")):
        assert seconds(kind, GB, group, cluster, level) > 0


def test_unknown_names() -> None:
    cluster = one_level(8)
    with pytest.raises(ClusterError, match=r"unknown collective 'allreduce': valid are all_reduce, .* Perhaps you meant 'all_reduce'"):
        collective_time("allreduce", 1, 8, level="link", cluster=cluster)
    with pytest.raises(ClusterError, match="unknown level 'device': valid are link"):
        collective_time("all_reduce", 1, 8, level="device", cluster=cluster)
    with pytest.raises(ClusterError, match="cannot be negative"):
        collective_time("all_reduce", [1.0, -1.0], 8, level="link", cluster=cluster)
    with pytest.raises(ClusterError, match="at least one device"):
        collective_time("all_reduce", 1, 0, level="link", cluster=cluster)


@given(
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(["dgx-h100", "p4d", "mi300x", "local-cpu"]),
    sizes=st.tuples(st.sampled_from([1, 2, 3, 5, 8]), st.sampled_from([1, 2, 6, 8])),
    nbytes=st.lists(st.integers(0, 10**12), min_size=1, max_size=8),
)
def test_more_bytes_never_take_less_time(kind: str, name: str, sizes: tuple[int, int], nbytes: list[int]) -> None:
    cluster = load_cluster(name).sized(sizes[0] * sizes[1])
    bound = bind_axes(cluster, sizes)
    assert bound is not None
    for size, level in zip(sizes, bound, strict=True):
        times = collective_time(kind, sorted(nbytes), size, level=level, cluster=cluster)
        assert times.shape == (len(nbytes),)
        assert np.all(np.diff(times) >= 0)
        assert np.all(times >= 0)
