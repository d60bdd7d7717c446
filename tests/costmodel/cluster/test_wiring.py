"""Wirings: what their links carry, against what is known of rings, tori and hypercubes, and against
schedules of messages.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.costmodel import Level, collective_time, dump, load_cluster
from autopar.costmodel.cluster.wiring import Wiring
from autopar.errors import ClusterError

LINE = Wiring(joined=((0, 1), (1, 2), (2, 3)))
CUBE = Wiring(joined=tuple((a, a ^ 1 << k) for a in range(8) for k in range(3) if a < a ^ 1 << k))


@pytest.mark.parametrize(
    ("wiring", "group", "telling", "exchanging", "hops"),
    [
        # A ring of 4: both ways around; the fullest link carries 2 of the 3 parts that each sends.
        (Wiring(torus=(4,)), 4, 1.0, 3 / 4, 4 / 3),
        # A ring of n: n² / 8 pairs pass each link one way.
        (Wiring(torus=(16,)), 16, 1.0, 15 / (2 * 16**2 / 8), 64 / 15),
        (Wiring(torus=(4, 4)), 16, 1.0, 15 / (4 * 8), 32 / 15),
        (CUBE, 8, 1.0, 7 / (3 * 4), 12 / 7),
        (Wiring(torus=(2, 2, 2)), 8, 1.0, 7 / (3 * 4), 12 / 7),
        # The ends of a line have one link of two, and 4 pairs pass its middle.
        (LINE, 4, 1 / 2, 3 / (2 * 4), 10 / 6),
        # A row of a torus closes to a ring, with half of its links; two of it are one link of four.
        (Wiring(torus=(4, 4)), 4, 1 / 2, 3 / 8, 4 / 3),
        (Wiring(torus=(4, 4)), 2, 1 / 4, 1 / 4, 1.0),
        (Wiring(torus=(4, 4)), 1, 1.0, 1.0, 1.0),
    ],
)
def test_what_groups_reach(
    wiring: Wiring, group: int, telling: float, exchanging: float, hops: float
) -> None:
    actual = wiring.reach(group)
    assert (actual.telling, actual.exchanging, actual.hops) == pytest.approx(
        (telling, exchanging, hops)
    )


def test_the_narrowest_cut_bounds_what_all_tell_all() -> None:
    """By brute force over all sets of devices of a wiring without any order in it."""
    wiring = Wiring(joined=((0, 1), (1, 2), (2, 0), (2, 3), (3, 4), (4, 5), (5, 3), (0, 1)))
    links = list(wiring.links())
    count = wiring.children
    parts = min(
        sum((a in near) != (b in near) for a, b in links) / size
        for size in range(1, count)
        for near in map(set, itertools.combinations(range(count), size))
    )
    ports = max(sum(device in pair for pair in links) for device in range(count))
    assert wiring.reach(count).telling == pytest.approx(parts * (count - 1) / ports)


def test_larger_groups_than_the_wiring_have_all_of_it() -> None:
    assert LINE.reach(9) == LINE.reach(4)


def test_prices_on_a_torus() -> None:
    level = Level(name="ici", size=16, latency=1e-6, bandwidth=4e11)
    device = replace(load_cluster("dgx-h100").device, launch=0.0)
    plain = replace(load_cluster("dgx-h100"), levels=(level,), device=device, sources={})
    torus = replace(plain, levels=(replace(level, wiring=Wiring(torus=(4, 4))),))

    def seconds(kind: str, nbytes: float) -> tuple[float, float]:
        return tuple(
            float(collective_time(kind, nbytes, 16, level="ici", cluster=c)) for c in (plain, torus)
        )  # type: ignore[return-value]

    one, other = seconds("all_gather", 1e9)
    assert one == other
    one, other = seconds("all_to_all", 1e12)
    assert other == pytest.approx(one * 32 / 15, rel=1e-3)
    one, other = seconds("all_to_all", 0)
    assert other == pytest.approx(one * 32 / 15)


def test_a_file_with_a_wiring(tmp_path: Path) -> None:
    cluster = load_cluster("dgx-h100")
    levels = (
        replace(cluster.levels[0], wiring=Wiring(torus=(2, 4))),
        replace(cluster.levels[1], oversubscription=3.0),
    )
    path = tmp_path / "torus.json"
    path.write_text(dump(replace(cluster, levels=levels)), encoding="utf-8")
    assert load_cluster(path).levels == levels


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "either a torus"),
        ({"torus": (2,), "joined": ((0, 1),)}, "either a torus"),
        ({"torus": (0, 4)}, "at least 1"),
        ({"torus": (1,)}, "2 to 256 children"),
        ({"torus": (32, 32)}, "2 to 256 children"),
        ({"joined": ((0, 0),)}, "two different"),
        ({"joined": ((0, 1), (2, 3))}, "no way from 0"),
    ],
)
def test_wrong_wirings(arguments: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ClusterError, match=message):
        Wiring(**arguments)  # type: ignore[arg-type]
