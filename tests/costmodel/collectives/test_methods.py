"""Closed forms of the textbook's methods: those of the simulated schedules, priced for a user."""

from __future__ import annotations

import json

import pytest

from autopar.analysis.measurements.collective_methods import method_rows
from autopar.cli import run
from autopar.cli.commands import bench
from autopar.costmodel import load_cluster
from autopar.costmodel.collectives.methods import METHODS, NAMES, method_line, method_of, sides
from autopar.errors import ClusterError, UsageError
from tests.costmodel.collectives.schedules.algorithms import costs

SIMULATED = {"naive": "linear", "hypercube": "recursive_doubling", "halving": "recursive_halving"}
"""The names of methods in the simulator, where they are others."""
STREAMED = ("chain", "two_tree", "in_switch")
SMALL = 2**16
"""Segments of a streamed buffer, so many that another one adds nothing that a port notices."""
ALL = [(kind, name) for kind, methods in METHODS.items() for name in methods]


def simulated(kind: str, name: str, ranks: int) -> tuple[float, float]:
    """Steps and traffic of the schedule that the simulator plays."""
    called = SIMULATED.get(name, name)
    if (kind, name) == ("reduce_scatter", "hypercube"):
        called = "recursive_halving"
    if (kind, name) == ("all_reduce", "parameter_server"):
        # Without segments: gathered whole, then given back.
        parts = [costs(one, called, ranks)[0] for one in ("reduce", "broadcast")]
        return sum(part.steps for part in parts), sum(part.traffic for part in parts)
    if name == "torus":
        both = costs(kind, called, sides(ranks))
        return sum(cost.steps for cost in both), sum(cost.traffic for cost in both)
    (cost,) = costs(kind, called, ranks, segments=SMALL)
    if name in STREAMED and cost.steps >= SMALL:
        # All segments but one follow the first: their bytes are the traffic, not the latency.
        streams = 2 if cost.steps >= 2 * SMALL else 1
        return cost.steps - streams * (SMALL - 1), cost.traffic
    return cost.steps, cost.traffic


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8, 12, 16])
@pytest.mark.parametrize(("kind", "name"), ALL)
def test_closed_forms_are_those_of_the_simulated_schedules(
    kind: str, name: str, ranks: int
) -> None:
    method = method_of(kind, name)
    steps, traffic = simulated(kind, name, ranks)
    assert method.steps(ranks) == pytest.approx(steps)
    # The last of many segments is all that a streamed method carries beside the whole.
    assert method.traffic(ranks) == pytest.approx(traffic, rel=1e-3 if name in STREAMED else 1e-9)


def test_the_time_is_that_of_the_formula() -> None:
    cluster = load_cluster("dgx-h100").sized(8)
    level = cluster.levels[0]
    start, each = method_line("broadcast", "binomial_tree", cluster)
    assert start == pytest.approx(cluster.device.launch + 3 * level.latency)
    assert each == pytest.approx(3 / level.rate(8, level.efficiency))


def test_rows_name_what_the_backend_takes() -> None:
    cluster = load_cluster("dgx-h100").sized(16)
    rows = method_rows(cluster, ["all"], ["all_reduce"], [2**10, 2**30])
    assert [row.method for row in rows] == 2 * list(METHODS["all_reduce"])
    large = {row.method: row for row in rows if row.nbytes == 2**30}
    assert large["ring"].port == pytest.approx(2 * 15 / 16 * 2**30)
    assert large["ring"].seconds < large["parameter_server"].seconds
    # Outside a node no switch of this cluster adds up.
    able = [row for row in large.values() if row.method != "in_switch"]
    assert all(row.taken_seconds <= row.seconds for row in able)
    assert {row.taken for row in rows if row.nbytes == 2**10} != {large["ring"].taken}


def test_unknown_methods_list_the_valid_ones() -> None:
    cluster = load_cluster("dgx-h100").sized(8)
    with pytest.raises(UsageError, match="unknown method 'tree': valid are naive"):
        method_rows(cluster, ["tree"], [], [1])
    with pytest.raises(UsageError, match="no method of all_to_all"):
        method_rows(cluster, ["ring"], ["all_to_all"], [1])
    with pytest.raises(UsageError, match="two devices or more"):
        method_rows(cluster.sized(1), ["ring"], [], [1])
    with pytest.raises(ClusterError, match="unknown method of reduce"):
        method_of("reduce", "ring")
    assert bench.METHODS == NAMES


def test_the_command_prices_and_measures_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["bench", "collectives", "--method", "naive,ring", "--cluster", "dgx-a100"]
    run([*asked, "--devices", "32", "--collectives", "all_reduce", "--sizes", "1MiB"])
    shown = capsys.readouterr().out
    assert "parameter_server" not in shown and "nccl takes" in shown and "2 (p - 1)" in shown
    run([*asked, "--json", "--sizes", "1KiB"])
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {row["method"] for row in rows} == {"naive", "ring"}
