"""Fits of measurements, the refusal of noise, and measured collectives in place of the table of
algorithms.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from autopar.costmodel import Cluster, Level, collective_time, dump, lines, load_cluster
from autopar.costmodel.calibration.collective_curves import (
    Links,
    agreed,
    calibrated,
    fit_collectives,
    fit_curve,
    fit_level,
    nonnegative_solution,
    ports_shared,
    refuse_noise,
    settled,
    spread,
)
from autopar.costmodel.cluster.measured_collectives import Curve, Measured
from autopar.costmodel.collectives import KINDS
from autopar.costmodel.collectives.bus_bandwidth import bus_factor
from autopar.errors import ClusterError, NoisyMeasurement

SIZES = [4.0**power * 1024 for power in range(9)]  # 1 KiB to 64 MiB
LOCAL = load_cluster("local-cpu")
GB = 1e9


def gloo(*levels: Level, measured: tuple[Measured, ...] = (), shared_host: bool = False) -> Cluster:
    """A cluster of CPU ranks."""
    return replace(
        LOCAL, name="c", levels=levels, shared_host=shared_host, sources={}, measured=measured
    )


def seconds(kind: str, nbytes: float, group: int, level: str, cluster: Cluster) -> float:
    return float(collective_time(kind, nbytes, group, level=level, cluster=cluster))


LOOPBACK = Level(name="loopback", size=2, latency=1e-4, bandwidth=4 * GB)
NIC = Level(name="nic", size=2, latency=5e-4, bandwidth=0.1 * GB)


# --- curves ---


@given(
    alpha=st.floats(1e-6, 1e-2),
    beta=st.floats(1e-12, 1e-7),
    steeper=st.floats(0.2, 5).filter(lambda x: not 0.7 < x < 1.4),
    index=st.integers(2, 6),
)
def test_a_curve_is_found_again(alpha: float, beta: float, steeper: float, index: int) -> None:
    curve = Curve(alpha=alpha, beta=beta, limit=SIZES[index], beta_above=beta * steeper)
    fit = fit_curve(SIZES, curve.seconds(SIZES).tolist())
    assert fit.max_error < 1e-4
    at = np.geomspace(SIZES[0], SIZES[-1], 50)
    if curve.seconds(SIZES[-1]) > 100 * alpha:  # else the break is lost below the latency
        assert fit.curve.seconds(at) == pytest.approx(curve.seconds(at), rel=0.02)


def test_one_line_stays_one_line_under_noise() -> None:
    rng = np.random.default_rng(0)
    times = [(1e-4 + 1e-9 * x) * rng.uniform(0.98, 1.02) for x in SIZES]
    fit = fit_curve(SIZES, times)
    assert fit.mean_error < 0.02
    assert fit.curve.seconds(1e6) == pytest.approx(1.1e-3, rel=0.03)


def test_two_segments_leave_less_error_than_one() -> None:
    curve = Curve(alpha=3e-4, beta=2e-10, limit=1e6, beta_above=9e-10)
    two = fit_curve(SIZES, curve.seconds(SIZES).tolist())
    one = fit_curve(SIZES[:4], curve.seconds(SIZES[:4]).tolist())
    assert two.curve.limit < math.inf and two.mean_error < 0.01
    assert one.curve.limit == math.inf


@given(columns=st.lists(st.tuples(*[st.floats(0.1, 10)] * 3), min_size=4, max_size=9))
def test_least_squares_without_negative_figures(columns: list[tuple[float, float, float]]) -> None:
    matrix = np.array(columns)
    ones = np.ones(len(matrix))
    actual = nonnegative_solution(matrix, ones)
    _, expected = nnls(matrix, ones)
    assert (actual >= 0).all()
    assert np.linalg.norm(matrix @ actual - ones) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("steeper", [0.25, 4.0])
def test_lines_of_a_curve(steeper: float) -> None:
    """A curve that flattens is the minimum of its lines; of one that steepens, the line is an upper
    bound.
    """
    curve = Curve(alpha=1e-4, beta=1e-9, limit=1e6, beta_above=steeper * 1e-9)
    least = np.min([alpha + beta * np.array(SIZES) for alpha, beta in curve.lines], axis=0)
    if steeper < 1:
        assert least == pytest.approx(curve.seconds(SIZES), rel=1e-12)
    else:
        assert (least >= curve.seconds(SIZES)).all()


# --- noise ---


def test_what_disturbs_only_adds_time() -> None:
    assert spread([1.0, 9.0, 1.04, 3.0, 1.02]) == pytest.approx(0.04)
    assert agreed([1.0, 9.0, 1.04, 3.0, 1.02]) == 1.02
    assert settled([1.0, 1.05, 1.09]) and not settled([1.0, 1.05, 1.11]) and not settled([1.0, 1.0])


def test_noise_is_refused_with_what_to_do() -> None:
    refuse_noise({"a": [1.0, 1.09, 1.0], "b": [2.0, 2.0, 2.1]})
    with pytest.raises(
        NoisyMeasurement,
        match=r"1 of 2 .* within 10% \(all_reduce by 11%\).*nothing is written.*chrt",
    ) as raised:
        refuse_noise({"all_reduce": [1.0, 1.05, 1.11], "b": [2.0, 2.0, 2.1]})
    assert raised.value.exit_code == 6


def repeats(value: float) -> tuple[float, ...]:
    return (value, value, value)


def test_ports_are_shared_by_as_many_as_slow_each_other_down() -> None:
    assert ports_shared(repeats(1.0), repeats(7.6), 8) == 8
    assert ports_shared(repeats(1.0), repeats(2.2), 8) == 2
    assert ports_shared(repeats(1.0), repeats(1.2), 6) == 1


# --- measured collectives go before the table, and give the links of other groups ---


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_measured_is_what_is_predicted(kind: str) -> None:
    curve = (
        Curve(alpha=7e-4, beta=3e-9, limit=1e6, beta_above=5e-9)
        if kind != "barrier"
        else Curve(alpha=7e-4, beta=0.0)
    )
    cluster = gloo(
        replace(NIC, size=4), measured=(Measured(kind=kind, level="nic", group=4, curve=curve),)
    )
    for nbytes in (0, 1e3, 1e6, 1e8):
        assert seconds(kind, nbytes, 4, "nic", cluster) == float(curve.seconds(nbytes))
    bare = replace(cluster, measured=())
    for other in set(KINDS) - {kind}:
        assert seconds(other, 1e6, 4, "nic", cluster) == seconds(other, 1e6, 4, "nic", bare)


@pytest.mark.parametrize("ranks", [3, 4, 7, 64])
def test_a_ring_of_other_size_is_derived_by_its_closed_form(ranks: int) -> None:
    """From two ranks, 2 (n - 1) steps for 2, and 2 (n - 1) / n of the bytes for 1; the break stays
    where it is.
    """
    curve = Curve(alpha=8e-4, beta=9e-9, limit=1e6, beta_above=1.2e-8)
    cluster = gloo(
        replace(NIC, size=ranks),
        measured=(Measured(kind="all_reduce", level="nic", group=2, curve=curve),),
    )
    for nbytes in (1e3, 1e6, 4e6):
        moved = 2 * (ranks - 1) / ranks
        expected = (ranks - 1) * 8e-4 + moved * (
            9e-9 * min(nbytes, 1e6) + 1.2e-8 * max(nbytes - 1e6, 0)
        )
        assert seconds("all_reduce", nbytes, ranks, "nic", cluster) == pytest.approx(
            expected, rel=1e-9
        )


def test_the_nearest_group_gives_the_links() -> None:
    two = Measured(kind="all_gather", level="nic", group=2, curve=Curve(alpha=1.0, beta=1.0))
    eight = Measured(
        kind="all_gather", level="nic", group=8, curve=Curve(alpha=7e-3, beta=7 / 8 * 2e-8)
    )
    cluster = gloo(replace(NIC, size=16), measured=(two, eight))
    assert seconds("all_gather", 1e6, 16, "nic", cluster) == pytest.approx(
        15e-3 + 15 / 16 * 2e-2, rel=1e-9
    )


def test_a_ring_over_two_levels_waits_for_the_slower() -> None:
    inside = Measured(
        kind="all_reduce", level="loopback", group=2, curve=Curve(alpha=4e-4, beta=4e-10)
    )
    across = Measured(kind="all_reduce", level="nic", group=2, curve=Curve(alpha=8e-4, beta=1.1e-8))
    cluster = gloo(LOOPBACK, replace(NIC, shared_by=2), measured=(inside, across))
    expected = 3 * 8e-4 + 1.5 * 1.1e-8 * 1e7
    assert seconds("all_reduce", 1e7, 4, "loopback:2+nic:2", cluster) == pytest.approx(
        expected, rel=1e-9
    )
    only = gloo(LOOPBACK, NIC, measured=(inside,))  # nothing is known of the other level: the table
    assert lines("all_reduce", 4, level="loopback:2+nic:2", cluster=only) == lines(
        "all_reduce", 4, level="loopback:2+nic:2", cluster=replace(only, measured=())
    )


def test_groups_that_share_a_port_are_no_faster_than_the_port() -> None:
    """Alone, a group reaches less than the port offers; two at once fill it, but do not take twice
    as long.
    """
    alone = Curve(alpha=8e-4, beta=1.3e-8)  # the port takes 1e-8 s a byte
    cluster = gloo(
        LOOPBACK,
        replace(NIC, shared_by=2),
        measured=(Measured(kind="all_reduce", level="nic", group=2, curve=alone),),
    )
    assert seconds("all_reduce", 1e7, 2, "nic", cluster) == pytest.approx(
        8e-4 + 2e-8 * 1e7, rel=1e-9
    )
    wide = replace(cluster, levels=(LOOPBACK, NIC))  # a port each
    assert seconds("all_reduce", 1e7, 2, "nic", wide) == float(alone.seconds(1e7))
    both = Measured(
        kind="all_reduce", level="nic", group=2, curve=Curve(alpha=9e-4, beta=2.2e-8), drivers=2
    )
    assert seconds("all_reduce", 1e7, 2, "nic", replace(cluster, measured=(both,))) == float(
        both.curve.seconds(1e7)
    )


def times_of(cluster: Cluster, level: str) -> dict[tuple[str, str, int, int], tuple[float, ...]]:
    """The times that 2 ranks on one level would measure, by the table."""
    return {
        (kind, level, 2, int(size)): repeats(seconds(kind, size, 2, level, cluster))
        for kind in KINDS
        for size in (SIZES if kind != "barrier" else [0])
    }


def test_two_calibrations_of_two_ranks_predict_four() -> None:
    """Measurements made up by the table, fitted and put together, give the table's times of groups
    that nobody measured.
    """
    truth = gloo(replace(LOOPBACK, latency=1e-4), replace(NIC, shared_by=2))
    device = (replace(truth.device, launch=0.0), {"device.launch": "made up"})
    truth = replace(truth, device=device[0])
    alone = {
        level.name: replace(truth, levels=(replace(level, size=2, shared_by=1),))
        for level in truth.levels
    }
    inner = fit_collectives(times_of(alone["loopback"], "loopback"), {})
    outer = fit_collectives(times_of(alone["nic"], "nic"), {})
    node = calibrated(
        "node",
        "gloo",
        device,
        Links(levels=[fit_level("loopback", 2, inner, shared_by=1)], measured=inner),
    )
    assert node.shared_host and node.cores is None
    crowded = calibrated(
        "node",
        "gloo",
        device,
        Links(levels=[fit_level("loopback", 2, inner, shared_by=1)], measured=inner),
        cores=1,
    )
    assert crowded == replace(node, cores=0.5) and crowded.core_share == 0.5
    actual = calibrated(
        "both",
        "gloo",
        device,
        Links(levels=[fit_level("nic", 2, outer, shared_by=1)], measured=outer),
        inside=node,
    )
    assert (actual.devices, actual.units, actual.level("nic").shared_by, actual.shared_host) == (
        4,
        (2, 4),
        2,
        False,
    )
    for kind in set(KINDS) - {"send"}:
        for group, level in ((2, "loopback"), (2, "nic"), (4, "loopback:2+nic:2")):
            for size in (1024, 2**20, 2**25):
                expected = seconds(kind, size, group, level, truth)
                assert seconds(kind, size, group, level, actual) == pytest.approx(
                    expected, rel=2e-3
                ), (kind, level)


def test_a_cluster_file_keeps_what_was_measured(tmp_path: Path) -> None:
    entries = (
        Measured(
            kind="all_reduce",
            level="nic",
            group=2,
            curve=Curve(alpha=8e-4, beta=9e-9),
            residual=0.02,
            spread=0.05,
        ),
        Measured(
            kind="send",
            level="loopback:2+nic:2",
            group=4,
            curve=Curve(alpha=1e-4, beta=2e-9, limit=4e6, beta_above=3e-9),
            drivers=2,
        ),
    )
    cluster = gloo(LOOPBACK, NIC, measured=entries)
    path = tmp_path / "c.json"
    path.write_text(dump(cluster), encoding="utf-8")
    assert load_cluster(path) == cluster
    for key, value, message in (
        ("kind", "allreduce", "all_reduce"),
        ("level", "nice", "loopback, nic"),
        ("seconds", -1.0, "alpha is -1"),
    ):
        data = json.loads(dump(cluster))
        data["measured"][0][key] = value
        path.write_text(json.dumps(data), encoding="utf-8")
        with pytest.raises(ClusterError, match=message):
            load_cluster(path)


def test_more_ranks_on_a_host_move_bytes_more_slowly() -> None:
    entry = Measured(
        kind="all_reduce",
        level="loopback",
        group=2,
        curve=Curve(alpha=4e-4, beta=1e-9, limit=1e6, beta_above=2e-9),
    )
    cluster = gloo(LOOPBACK, measured=(entry,), shared_host=True)
    assert cluster.sized(4).measured[0].curve == Curve(
        alpha=4e-4, beta=2e-9, limit=1e6, beta_above=4e-9
    )
    assert cluster.sized(4).sized(2) == cluster


def test_bus_bandwidth_has_the_factors_of_the_nccl_tests() -> None:
    expected = {
        "all_reduce": 14 / 8,
        "reduce_scatter": 7 / 8,
        "all_gather": 7 / 8,
        "all_to_all": 7 / 8,
        "broadcast": 1.0,
        "reduce": 1.0,
    }
    assert {kind: bus_factor(kind, 8) for kind in expected} == expected
    assert {*KINDS} == {kind for kind in KINDS if bus_factor(kind, 2) >= 0}
    with pytest.raises(ClusterError, match="unknown collective 'allreduce'"):
        bus_factor("allreduce", 8)
