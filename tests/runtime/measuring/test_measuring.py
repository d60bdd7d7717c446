"""Measurements on real forked Gloo ranks: what is measured, on which groups, and the two commands
from end to end.
"""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from autopar.analysis.measurements import calibration as calibrated
from autopar.cli import run
from autopar.costmodel import load_cluster
from autopar.costmodel.collectives import KINDS as MODEL_KINDS
from autopar.costmodel.device.host_actions import HOST_ACTIONS
from autopar.errors import NoisyMeasurement, RunError, UsageError
from autopar.runtime.launch import run_ranks
from autopar.runtime.measuring import (
    KINDS,
    Wanted,
    byte_sizes,
    collective_times,
    device_times,
    measure_on_rank,
    measurement,
    places,
)
from autopar.runtime.measuring.collective_times import COLLECTIVES, GroupPlace, Operands
from autopar.runtime.measuring.crew import Crew

CPU = torch.device("cpu")


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measurements of a second; forked ranks inherit them."""
    monkeypatch.setattr(collective_times, "CALLS", 1)
    monkeypatch.setattr(collective_times, "PASSES", 3)
    monkeypatch.setattr(device_times, "BATCH_SECONDS", 1e-4)
    monkeypatch.setattr(device_times, "PASSES", 3)
    monkeypatch.setattr(device_times, "COLD", 2**20)
    monkeypatch.setattr(device_times, "SHAPES", ((32, 32, 32), (64, 64, 64), (512, 512, 512)))
    monkeypatch.setattr(device_times, "QUICK", 3)
    monkeypatch.setattr(device_times, "PARAMETERS", (2**10, 2**12))
    monkeypatch.setattr(calibrated, "QUICK_SIZES", (2**10, 2**18))


def test_the_cost_model_knows_the_same_collectives() -> None:
    assert set(KINDS) == set(MODEL_KINDS)


@pytest.mark.parametrize("nodes, per_node", [(1, 2), (1, 6), (4, 1), (2, 2), (3, 4)])
def test_groups_of_a_place_are_disjoint_and_on_their_level(nodes: int, per_node: int) -> None:
    actual = places(nodes, per_node, "gloo")
    assert {place.size for place in actual} >= ({per_node} | {nodes}) - {1}
    for place in actual:
        members = list(itertools.chain(*place.groups))
        assert len(members) == len(set(members)) and max(members) < nodes * per_node
        assert all(len(group) == place.size for group in place.groups)
        on = [{rank // per_node for rank in group} for group in place.groups]
        if place.level == "loopback":
            assert all(len(held) == 1 for held in on) and place.drivers == 1
        elif place.level == "nic":
            assert all(len(held) == place.size for held in on) and place.drivers == per_node
        else:
            assert (
                place.level == f"loopback:{per_node}+nic:{nodes}" and place.size == nodes * per_node
            )


@pytest.mark.parametrize(("per_node", "groups"), [(1, []), (3, [1, 3])])
def test_messages_of_one_rank_and_of_all_share_a_port(
    monkeypatch: pytest.MonkeyPatch, per_node: int, groups: list[int]
) -> None:
    """Where a node has one rank there is nothing to share."""
    asked: list[int] = []

    def measured(
        crew: Crew, where: list[GroupPlace], *given: object
    ) -> dict[str, tuple[float, ...]]:
        asked.append(len(where[0].groups))
        return {"send": (float(len(asked)),)}

    monkeypatch.setattr(measurement, "measure_collectives", measured)
    wanted = Wanted(kinds=KINDS, sizes=(1024,), settled=lambda repeats: True, device=True)
    actual = measurement.measured_port(cast(Crew, None), places(2, per_node, "gloo"), wanted)
    assert asked == groups and actual == (((1.0,), (2.0,)) if groups else None)


def test_sizes() -> None:
    assert byte_sizes(1024, 2**26) == tuple(1024 * 4**power for power in range(9))
    assert byte_sizes(1024, 10**6)[-1] == 10**6


def _each_kind_once() -> dict[str, list[float]]:
    """The contents of this rank's buffers after one call of each collective."""
    crew = Crew(CPU)
    group = dist.group.WORLD
    members = tuple(range(crew.world))
    assert group is not None
    results = {}
    for kind, call in COLLECTIVES.items():
        whole = torch.full((6,), float(crew.rank + 1))
        shard = torch.full((3,), float(crew.rank + 1))
        call(Operands(whole=whole, shard=shard, group=group, members=members, rank=crew.rank))
        results[kind] = [*whole.tolist(), *shard.tolist()]
    return results


def test_calls_move_what_they_say() -> None:
    """Calls in place are judged by their result; the functional ones leave their operands alone."""
    first, second = run_ranks(_each_kind_once, 2)
    assert second["broadcast"][0] == second["send"][0] == 1.0
    assert first["reduce"][0] == 3.0
    assert second["scatter"][6:] == [1.0] * 3
    assert first["all_reduce"][0] == 1.0 and second["all_reduce"][0] == 2.0


def _session() -> tuple[int, int, float, list[list[float]]]:
    crew = Crew(CPU)
    times = crew.timed(lambda: dist.barrier(), 3)
    return crew.node_count, crew.per_node, crew.offset, times.flatten(0, 1).tolist()


def test_one_clock_on_one_host() -> None:
    for nodes, per_node, offset, times in run_ranks(_session, 2):
        assert (nodes, per_node, offset) == (1, 2, 0.0)
        assert len(times) == 6 and all(start <= entered <= left for start, entered, left in times)


def test_everything_is_measured_on_two_ranks(short: None) -> None:
    wanted = Wanted(
        kinds=KINDS, sizes=(1024, 65536), settled=lambda repeats: True, device=True, quick=True
    )
    actual = run_ranks(measure_on_rank, 2, wanted, CPU)
    assert actual[0] == actual[1]
    keys = {
        (kind, "loopback", 2, size)
        for kind in KINDS
        for size in ((1024, 65536) if kind != "barrier" else (0,))
    }
    assert set(actual[0].collectives) == keys
    assert all(len(repeats) == 3 and min(repeats) > 0 for repeats in actual[0].collectives.values())
    device = actual[0].device
    assert {key[0] for key in device.products} == set(device_times.DTYPES)
    assert all(
        min(times) > 0
        for times in (
            *device.products.values(),
            device.copy,
            device.stream,
            device.update,
            device.launch,
        )
    )
    assert not device.dispatch and device.capacity > device.reserved > 0
    assert actual[0].port is None


def test_what_has_not_settled_is_measured_again(short: None) -> None:
    wanted = Wanted(
        kinds=("all_reduce",), sizes=(1024,), settled=lambda repeats: False, device=False
    )
    (repeats,) = run_ranks(measure_on_rank, 2, wanted, CPU)[0].collectives.values()
    assert len(repeats) == collective_times.PASSES


def test_calibrate_writes_a_cluster_that_plans(
    short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "here.json"
    run(["calibrate", "--nproc", "2", "--quick", "--tolerance", "1000", "-o", str(path), "--json"])
    assert json.loads(capsys.readouterr().out) == json.loads(path.read_text(encoding="utf-8"))
    cluster = load_cluster(path)
    assert (cluster.name, cluster.devices, cluster.backend, cluster.shared_host) == (
        "here",
        2,
        "gloo",
        True,
    )
    assert {entry.kind for entry in cluster.measured} == set(KINDS)
    assert set(cluster.device.host) == set(HOST_ACTIONS)
    assert sum(cluster.device.host.values()) > 0, "Python takes some time around kernels"
    run(["cluster", "show", str(path), "--devices", "4"])
    told = capsys.readouterr().out
    assert "cluster here: 4 x CPU rank" in told and "for a trained parameter in a step" in told


def test_calibrate_refuses_noise_and_writes_nothing(short: None, tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    with pytest.raises(NoisyMeasurement, match="do not repeat within 0%"):
        run(["calibrate", "--nproc", "2", "--quick", "--tolerance", "1e-12", "-o", str(path)])
    assert not path.exists()


def test_bench_collectives(short: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tmp_path / "bench.svg"
    options = ["--nproc", "2", "--sizes", "1KiB,64KiB", "--collectives", "all_reduce,all_gather"]
    run(["bench", "collectives", *options, "--json", "--plot", str(plot)])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["kind"], row["nbytes"]) for row in rows] == list(
        itertools.product(("all_reduce", "all_gather"), (1024, 65536))
    )
    for row in rows:
        factor = {"all_reduce": 1.0, "all_gather": 0.5}[row["kind"]]
        assert row["bus_bandwidth"] == pytest.approx(factor * row["algorithm_bandwidth"])
        assert row["algorithm_bandwidth"] == pytest.approx(row["nbytes"] / row["seconds"])
        assert row["error"] == pytest.approx(row["predicted"] / row["seconds"] - 1)
    drawn = ElementTree.parse(plot).getroot()
    assert len(drawn.findall(".//{*}circle")) == 4 and len(drawn.findall(".//{*}polyline")) == 2


@pytest.mark.parametrize(
    "argv, error, message",
    [
        (["calibrate", "-o", "x.yaml"], UsageError, "ends in .json"),
        (["calibrate", "-o", "x.json", "--nproc", "1"], UsageError, "2 ranks or more"),
        (["calibrate", "-o", "x.json", "--tolerance", "0"], UsageError, "must be above 0"),
        (
            ["bench", "collectives", "--collectives", "allreduce"],
            UsageError,
            "unknown collective 'allreduce'.*all_reduce",
        ),
        (["bench", "collectives", "--sizes", "1KX"], UsageError, "--sizes '1KX'"),
        (["bench", "collectives", "--backend", "nccl"], RunError, "nccl"),
    ],
)
def test_bad_options(
    argv: list[str],
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=message):
        run(argv)
