"""Collectives: closed forms on one level, shared ports, several levels, and what holds for every
kind.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.costmodel import (
    KINDS,
    Cluster,
    Level,
    bind_axes,
    collective_time,
    linear,
    lines,
    load_cluster,
    parse_span,
    presets,
)
from autopar.costmodel.cluster.protocols import Protocol
from autopar.costmodel.collectives import fastest_way, lower_envelope
from autopar.costmodel.collectives.algorithm_lines import Way, parts_of, ways
from autopar.costmodel.collectives.backends import TABLE
from autopar.costmodel.collectives.bus_bandwidth import bus_factor
from autopar.errors import ClusterError
from tests.costmodel.collectives.schedules.algorithms import build
from tests.costmodel.collectives.schedules.patterns import ring_gather
from tests.costmodel.collectives.schedules.schedule import Schedule, execute, together
from tests.costmodel.collectives.schedules.simulator import Link, simulate

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
def test_bytes_of_1_2_gb_at_1_gb_per_second(
    backend: str, kind: str, group: int, expected: float
) -> None:
    assert seconds(kind, 1.2 * GB, group, one_level(group, backend)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("backend", "kind", "group", "steps"),
    [
        ("nccl", "all_reduce", 2, 2),
        ("nccl", "all_reduce", 16, 30),
        ("nccl", "all_gather", 16, 15),
        ("nccl", "all_to_all", 9, 8),
        ("nccl", "gather", 4, 3),
        ("nccl", "barrier", 5, 8),
        ("gloo", "all_reduce", 4, 6),
        ("gloo", "reduce_scatter", 4, 6),
        ("gloo", "all_to_all", 4, 1),
        ("gloo", "broadcast", 5, 3),
        ("gloo", "barrier", 8, 3),
    ],
)
def test_steps_of_an_empty_message(backend: str, kind: str, group: int, steps: int) -> None:
    assert seconds(kind, 0, group, one_level(group, backend, latency=1e-5)) == pytest.approx(
        steps * 1e-5
    )


RING = ("ring", "tree")
QUICK = Protocol(name="quick", algorithms=RING, overhead=1e-5, latency=1e-6, efficiency=0.1)
BROAD = Protocol(name="broad", algorithms=RING, overhead=1e-4, latency=1e-6, efficiency=1.0)


def test_protocols_are_chosen_by_size() -> None:
    cluster = one_level(8, protocols=(QUICK, BROAD))
    actual = lines("all_reduce", 8, level="link", cluster=cluster)
    assert actual == pytest.approx(
        np.array([(1e-5 + 14e-6, 17.5 / GB), (1e-4 + 14e-6, 1.75 / GB)]), rel=1e-9, abs=0
    )
    assert linear("all_reduce", 8, level="link", cluster=cluster) == actual[-1]
    assert fastest_way("all_reduce", 1e3, 8, level="link", cluster=cluster).name == "ring (quick)"
    assert fastest_way("all_reduce", 1e6, 8, level="link", cluster=cluster).name == "ring (broad)"
    # The overhead of a protocol has the launch in it.
    slow_start = replace(cluster, device=replace(DEVICE, launch=1.0))
    assert lines("all_reduce", 8, level="link", cluster=slow_start) == actual
    assert linear("all_to_all", 8, level="link", cluster=slow_start)[0] == 1.0
    # No protocol names the sends of an all-to-all: they run at the level's own figures.
    assert linear("all_to_all", 8, level="link", cluster=cluster) == pytest.approx(
        (0.0, 7 / 8 / GB)
    )


def test_a_protocol_that_is_never_the_least_gives_no_line() -> None:
    between = replace(QUICK, name="between", overhead=9e-5, efficiency=0.12)
    assert lines(
        "all_reduce", 8, level="link", cluster=one_level(8, protocols=(QUICK, between, BROAD))
    ) == lines("all_reduce", 8, level="link", cluster=one_level(8, protocols=(QUICK, BROAD)))


def test_one_protocol_runs_on_all_levels_that_have_it() -> None:
    cluster = two_levels()
    inner, outer = cluster.levels
    slow = replace(QUICK, latency=1e-5)
    cluster = replace(
        cluster,
        levels=(replace(inner, protocols=(QUICK, BROAD)), replace(outer, protocols=(slow, BROAD))),
    )
    names = {
        fastest_way("all_reduce", size, 32, level="nvlink:8+nic:4", cluster=cluster).name
        for size in (0, 1e4, 1e6, 1e9)
    }
    assert names == {"tree (quick)", "tree (broad)"}
    every = ways(
        "all_reduce",
        TABLE["nccl"]["all_reduce"],
        parts_of(cluster, parse_span(cluster, "nvlink:8+nic:4", 32)),
        launch=0.0,
    )
    assert sorted(way.name for way in every) == [
        "ring (broad)",
        "ring (quick)",
        "tree (broad)",
        "tree (quick)",
    ]
    # 2 * 7 steps of a chain inside, 2 * log2(4) between, and the overhead of both levels.
    assert lines("all_reduce", 32, level="nvlink:8+nic:4", cluster=cluster)[0][0] == pytest.approx(
        14 * 1e-6 + 4 * 1e-5 + 2e-5
    )


def test_the_part_of_a_device_stays_in_its_own_memory() -> None:
    copying = replace(
        BROAD, algorithms=("ring", "tree", "peer to peer", "message"), copy_bandwidth=5 * GB
    )
    plain = replace(copying, copy_bandwidth=None)
    for kind, parts in (
        ("all_reduce", 2 / 4),
        ("all_gather", 1 / 4),
        ("all_to_all", 1 / 4),
        ("send", 0),
    ):
        slower, faster = (
            seconds(kind, GB, 4, one_level(4, protocols=(one,))) for one in (copying, plain)
        )
        assert slower - faster == pytest.approx(parts / 5)


def test_reduction_in_the_switch_beats_the_ring() -> None:
    plain = one_level(8)
    switch = one_level(8, features=("in_switch",))
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
    assert linear("all_gather", 4, level="nic", cluster=two_levels(shared_by=8))[
        1
    ] == pytest.approx(8 * alone, rel=1e-9, abs=0)
    # With one device a node there is nobody to share with.
    thin = replace(
        two_levels(shared_by=8),
        levels=(replace(two_levels().levels[0], size=1), two_levels(shared_by=8).levels[1]),
    )
    assert linear("all_gather", 4, level="nic", cluster=thin)[1] == pytest.approx(
        alone, rel=1e-9, abs=0
    )


def test_over_two_levels_each_device_carries_its_share_outside() -> None:
    cluster = two_levels()
    text = "nvlink:8+nic:4"
    # Eight rings, each through another port: outside 31/32 of 1/8 of the bytes at 1 GB/s; inside
    # 31/32 of the bytes at 10 GB/s. Of the 31 steps of a ring 4 leave a node.
    expected = (27e-6 + 4e-5, max(31 / 32 / 8, 31 / 32 / 10) / GB)
    assert linear("all_gather", 32, level=text, cluster=cluster) == pytest.approx(
        expected, rel=1e-9, abs=0
    )
    # A tree carries 3/4 of 1/8 of the bytes outside, up and down again.
    assert linear("all_reduce", 32, level=text, cluster=cluster)[1] == pytest.approx(
        2 * 3 / 32 / GB, rel=1e-9, abs=0
    )
    # An all-to-all sends 24 of 32 parts outside through the device's own port.
    assert linear("all_to_all", 32, level=text, cluster=cluster)[1] == pytest.approx(
        24 / 32 / GB, rel=1e-9, abs=0
    )


def test_gloo_runs_one_ring_over_all_levels() -> None:
    cluster = two_levels(backend="gloo", shared_by=8)
    expected = (62 * 1e-5, 2 * 31 / 32 / GB)
    assert linear("all_reduce", 32, level="nvlink:8+nic:4", cluster=cluster) == pytest.approx(
        expected, rel=1e-9, abs=0
    )
    # Four groups of two members a node share each NIC.
    assert linear("all_gather", 8, level="nvlink:2+nic:4", cluster=cluster)[1] == pytest.approx(
        4 * 7 / 8 / GB, rel=1e-9, abs=0
    )


@pytest.mark.parametrize("backend", TABLE)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_on_every_backend(backend: str, kind: str) -> None:
    cluster = two_levels(backend=backend)
    assert seconds(kind, GB, 1, cluster, "device") == 0
    for group, level in ((8, "nvlink"), (4, "nic"), (32, "nvlink:8+nic:4")):
        assert seconds(kind, GB, group, cluster, level) > 0


def test_unknown_names() -> None:
    cluster = one_level(8)
    with pytest.raises(
        ClusterError,
        match=(
            r"unknown collective 'allreduce': valid are all_reduce, .* Perhaps you meant "
            r"'all_reduce'"
        ),
    ):
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
def test_more_bytes_never_take_less_time(
    kind: str, name: str, sizes: tuple[int, int], nbytes: list[int]
) -> None:
    cluster = load_cluster(name).sized(sizes[0] * sizes[1])
    bound = bind_axes(cluster, sizes)
    assert bound is not None
    for size, level in zip(sizes, bound, strict=True):
        times = collective_time(kind, sorted(nbytes), size, level=level, cluster=cluster)
        assert times.shape == (len(nbytes),)
        assert np.all(np.diff(times) >= 0)
        assert np.all(times >= 0)


@pytest.mark.parametrize(
    ("backend", "kind", "algorithm"),
    [
        ("nccl", "all_reduce", "ring"),
        ("nccl", "all_gather", "ring"),
        ("nccl", "reduce_scatter", "ring"),
        ("nccl", "all_to_all", "pairwise"),
        ("nccl", "gather", "linear"),
        ("nccl", "scatter", "linear"),
        ("nccl", "send", "message"),
        ("gloo", "all_reduce", "ring"),
        ("gloo", "all_gather", "ring"),
        ("gloo", "all_to_all", "linear"),
        ("gloo", "broadcast", "binomial_tree"),
        ("gloo", "gather", "parameter_server"),
        ("gloo", "scatter", "parameter_server"),
        ("gloo", "send", "message"),
        ("gloo", "barrier", "dissemination"),
    ],
)
@pytest.mark.parametrize("group", [2, 3, 8, 9])
def test_what_a_backend_runs_takes_as_long_as_its_schedule(
    backend: str, kind: str, algorithm: str, group: int
) -> None:
    cluster = one_level(group, backend, latency=1e-5)
    for nbytes in (0, 1e3, 1e9):
        simulated = simulate(
            build(kind, algorithm, group), nbytes, (group,), (Link(latency=1e-5, rate=GB),)
        )
        assert seconds(kind, nbytes, group, cluster) == pytest.approx(simulated, rel=1e-9)


@pytest.mark.parametrize(("members", "nodes"), [(2, 2), (4, 2), (4, 3), (8, 4)])
@pytest.mark.parametrize("shared_by", [1, 2])
def test_rings_through_every_port(members: int, nodes: int, shared_by: int) -> None:
    """As many rings as a node has members, each leaving it by another port, simulated round by
    round.
    """
    ranks = members * nodes
    rings = []
    for first in range(members):
        order = [
            node * members + (first + i) % members for node in range(nodes) for i in range(members)
        ]
        # Every rank has a chunk for each ring.
        rings.append(ring_gather(order, [(rank * members + first,) for rank in order]))
    count = ranks * members
    schedule = Schedule(
        kind="all_gather", ranks=ranks, parts=count, chunks=count, rounds=tuple(together(*rings))
    )
    whole = execute(schedule, np.eye(ranks, count).tolist())
    assert not np.isnan(whole).any()
    inner = Level(name="nvlink", size=members, latency=0.0, bandwidth=1e6 * GB)
    outer = Level(name="nic", size=nodes, latency=0.0, bandwidth=GB, shared_by=shared_by)
    cluster = Cluster(name="test", device=DEVICE, levels=(inner, outer))
    links = (Link(latency=0.0, rate=1e6 * GB), Link(latency=0.0, rate=GB, shared_by=shared_by))
    predicted = seconds("all_gather", GB, ranks, cluster, f"nvlink:{members}+nic:{nodes}")
    assert predicted == pytest.approx(simulate(schedule, GB, (members, nodes), links), rel=1e-9)


def test_every_protocol_of_a_preset_says_where_its_figures_come_from() -> None:
    for name in presets():
        cluster = load_cluster(name)
        for level in cluster.levels:
            for protocol in level.protocols:
                copying = () if protocol.copy_bandwidth is None else ("copy_bandwidth",)
                for figure in ("overhead", "latency", "efficiency", *copying):
                    source = cluster.sources[f"{level.name}.{protocol.key}.{figure}"]
                    assert (
                        source.text
                        and (source.kind != "fitted" or (source.error is not None and source.rows))
                        and str(source)
                    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithms": ("rings",)}, "unknown algorithm 'rings': valid are ring, "),
        ({"algorithms": ()}, "no algorithm runs in it"),
        ({"overhead": -1.0}, "overhead is -1.0; it must be finite and not negative"),
        ({"latency": float("inf")}, "latency is inf"),
        ({"efficiency": 1.5}, "efficiency is 1.5; it must be above 0 and at most 1"),
    ],
)
def test_wrong_protocols(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        replace(QUICK, **changes)  # type: ignore[arg-type]


@given(
    drawn=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=12),
    nbytes=st.floats(0, 100),
)
def test_the_lower_envelope_is_the_minimum(drawn: list[tuple[int, int]], nbytes: float) -> None:
    kept = lower_envelope(drawn)
    assert min(a + b * nbytes for a, b in kept) == pytest.approx(
        min(a + b * nbytes for a, b in drawn)
    )
    assert set(kept) <= set(drawn)
    for before, after in itertools.pairwise(kept):
        assert before[0] < after[0] and before[1] > after[1]


# Rows of nccl-tests on 8 GPUs of an A100 node (stas00/ml-engineering@744d01e1:network/README.md),
# on 2 x 8 of p4de and 8 of p5 (awslabs/awsome-distributed-training@0edaf152), and of an A100 node
# with 2 and 4 GPUs (VIA-Research/vTrain@f8dda847:trace/a100): none of those inside a node was
# fitted to.
@pytest.mark.parametrize(
    ("name", "group", "level", "nbytes", "measured"),
    [
        ("dgx-a100", 8, "nvlink", 2**23, 133.5e-6),
        ("dgx-a100", 8, "nvlink", 2**26, 684.6e-6),
        ("dgx-a100", 8, "nvlink", 2**34, 127997e-6),
        ("dgx-a100", 2, "nvlink", 2**25, 230e-6),
        ("dgx-a100", 4, "nvlink", 2**27, 998.6e-6),
        ("p4d", 16, "nvlink:8+nic:2", 8, 164.3e-6),
        ("p4d", 16, "nvlink:8+nic:2", 2**23, 762.8e-6),
        ("p4d", 16, "nvlink:8+nic:2", 2**31, 51406e-6),
        ("p5", 8, "nvlink", 2**19, 21.17e-6),
        ("p5", 8, "nvlink", 2**24, 124e-6),
        ("p5", 8, "nvlink", 2**34, 62239e-6),
    ],
)
def test_published_all_reduces(
    name: str, group: int, level: str, nbytes: int, measured: float
) -> None:
    assert seconds(
        "all_reduce", nbytes, group, load_cluster(name).sized(16), level
    ) == pytest.approx(measured, rel=0.2)


def test_rings_on_h200_without_the_switch() -> None:
    cluster = load_cluster("hgx-h200")
    ring = replace(cluster, levels=tuple(replace(level, features=()) for level in cluster.levels))
    large = 2.0**34
    for kind, used, bus in (
        ("all_reduce", cluster, 480.0),
        ("all_reduce", ring, 367.2),
        ("all_gather", ring, 361.4),
    ):
        taken = seconds(kind, large, 8, used, "nvlink")
        assert large / taken * bus_factor(kind, 8) / GB == pytest.approx(bus, rel=0.1)


# Rows of ai-dynamo/aiconfigurator@095f58a5 (NCCL 2.27 to 2.29) that no fit has seen.
@pytest.mark.parametrize(
    ("name", "kind", "group", "nbytes", "measured"),
    [
        ("dgx-h100", "all_gather", 8, 2**25, 129.5e-6),
        ("dgx-h100", "reduce_scatter", 4, 2**29, 1312e-6),
        ("hgx-h200", "all_reduce", 8, 2**27, 565e-6),
        ("dgx-b200", "all_to_all", 8, 2**26, 140e-6),
        ("gb200-nvl72", "all_gather", 64, 2**32, 6323e-6),
        ("gb200-nvl72", "all_reduce", 64, 2**20, 73.4e-6),
        ("gb200-nvl72", "reduce_scatter", 32, 2**30, 1551e-6),
        ("rtx-pro-6000", "all_reduce", 4, 2**28, 15667e-6),
        ("l40s", "all_gather", 4, 2**28, 42.7e-3),
    ],
)
def test_collectives_of_today(
    name: str, kind: str, group: int, nbytes: int, measured: float
) -> None:
    cluster = load_cluster(name).sized(group)
    (level,) = bind_axes(cluster, (group,)) or ("",)
    assert seconds(kind, nbytes, group, cluster, level) == pytest.approx(measured, rel=0.15)


def test_figures_for_one_collective_go_before_those_for_all() -> None:
    own = replace(BROAD, name="own", collectives=("all_gather",), efficiency=0.5)
    level = one_level(4, protocols=(BROAD, own)).levels[0]
    assert [p.name for p in level.protocols_for("all_gather", "ring")] == ["own"]
    assert [p.name for p in level.protocols_for("all_reduce", "ring")] == ["broad"]
    assert [p.name for p in level.protocols_for("all_to_all", "peer to peer")] == ["plain"]


def test_a_switch_inside_works_with_trees_outside() -> None:
    cluster = two_levels()
    inner, outer = cluster.levels
    simple = replace(BROAD, name="simple")
    switch = replace(BROAD, name="switch", algorithms=("in-switch",), efficiency=1.0)
    cluster = replace(
        cluster,
        levels=(
            replace(inner, features=("in_switch",), protocols=(QUICK, simple, switch)),
            replace(outer, protocols=(QUICK, simple)),
        ),
    )
    names = {way.name for way in _ways(cluster, "all_reduce", "nvlink:8+nic:4", 32)}
    assert (
        "in-switch (switch) + tree (simple)" in names
        and "in-switch (switch) + tree (quick)" not in names
    )


def _ways(cluster: Cluster, kind: str, level: str, group: int) -> list[Way]:
    return ways(
        kind, TABLE["nccl"][kind], parts_of(cluster, parse_span(cluster, level, group)), launch=0.0
    )


def test_pat_runs_where_no_two_members_share_a_node() -> None:
    cluster = two_levels()
    cluster = replace(
        cluster, levels=tuple(replace(level, features=("pat",)) for level in cluster.levels)
    )
    actual = {
        level: [way.line for way in _ways(cluster, "all_gather", level, n) if "pat" in way.name]
        for level, n in SPANS.items()
    }
    assert actual == {
        "nvlink": [],
        "nvlink:8+nic:4": [],
        "nic": [(pytest.approx(2 * 1e-5), pytest.approx(3 / 4 / GB))],
    }
    # Recursive doubling: as a schedule of messages.
    simulated = simulate(
        build("all_gather", "recursive_doubling", 4), GB, (4,), (Link(latency=1e-5, rate=GB),)
    )
    assert sum(actual["nic"][0][i] * (1, GB)[i] for i in (0, 1)) == pytest.approx(simulated)


SPANS = {"nvlink": 8, "nvlink:8+nic:4": 32, "nic": 4}


def test_rails_send_what_is_for_other_places_through_the_node_first() -> None:
    plain = two_levels()
    inner, outer = plain.levels
    slow = replace(inner, bandwidth=0.5 * GB)
    rails = replace(plain, levels=(slow, replace(outer, features=("rails",))))
    # 7 of 32 parts stay inside, and 7 of 8 of the 24 that leave go to their rail first.
    assert linear("all_to_all", 32, level="nvlink:8+nic:4", cluster=rails)[1] == pytest.approx(
        (7 + 21) / 32 / (0.5 * GB)
    )
    assert linear("all_gather", 4, level="nic", cluster=rails) == linear(
        "all_gather", 4, level="nic", cluster=plain
    )


def test_an_oversubscribed_level_carries_less() -> None:
    whole = one_level(8)
    part = one_level(8, oversubscription=4.0)
    for kind in ("all_gather", "all_to_all", "send"):
        assert seconds(kind, GB, 8, part) == pytest.approx(4 * seconds(kind, GB, 8, whole))
