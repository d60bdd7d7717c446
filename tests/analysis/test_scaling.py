"""How a model scales: numbers of devices as people write them, money, targets, and rows that are
the plans of the search.
"""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from report_models import perceptrons

import autopar
from autopar.analysis.searches.scaling import Row
from autopar.cli import run
from autopar.cli.scaling_arguments import counts_of, target_seconds
from autopar.errors import UsageError
from autopar.report.scaling import answers, scaling_plot

ROWS = [
    Row(cluster="a", devices=1, batch=8, step=4.0, price=1.0),
    Row(cluster="a", devices=2, batch=8, step=2.5, price=1.0),
    Row(cluster="a", devices=4, batch=8, why="does not fit", price=1.0),
    Row(cluster="b", devices=2, batch=8, step=1.0, price=3.0),
]


def test_money_is_devices_by_price_by_hours() -> None:
    assert ROWS[1].money == pytest.approx(2 * 1.0 * 2.5 / 3600) and ROWS[
        1
    ].per_money == pytest.approx(8 / (5 / 3600))
    assert ROWS[2].money is None


@pytest.mark.parametrize(
    ("step", "per_money", "said"),
    [
        (
            None,
            None,
            ["fastest: 2 devices of b, 1.00 s", "most samples for the money: 1 device of a"],
        ),
        (3.0, None, ["cheapest by the hour within 3.00 s a step: 2 devices of a"]),
        (0.5, None, ["within 500 ms a step: none of them"]),
        (None, 5000.0, ["fastest with 5000 samples for a unit of money: 2 devices of a"]),
        (None, 1e6, ["none of them"]),
    ],
)
def test_answers(step: float | None, per_money: float | None, said: list[str]) -> None:
    actual = "\n".join(answers(ROWS, step, per_money))
    assert all(words in actual for words in said), actual


@pytest.mark.parametrize(
    "text",
    ["0", "x", "8..4", "1..", "-1", "1,2,,", "1..99999999999", ",".join(map(str, range(1, 40)))],
)
def test_what_is_no_number_of_devices(text: str) -> None:
    with pytest.raises(UsageError, match="--devices"):
        counts_of(text)


def test_the_plot_has_a_line_for_each_cluster() -> None:
    assert scaling_plot(ROWS).count("<polyline") == 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(tmp_path / "model.onnx")
    plot = tmp_path / "plot.svg"
    onnx.save(perceptrons(), model)
    both = ["--cluster", "dgx-h100", "--cluster", "dgx-a100-80g"]
    asked = [
        "compare",
        model,
        "--devices",
        "1..4",
        *both,
        "--price",
        "dgx-h100=2.5",
        "--target-step",
        "1s",
        "--plot",
        str(plot),
    ]
    run([*asked, "--json"])
    printed = json.loads(capsys.readouterr().out)
    assert [(row["cluster"], row["devices"]) for row in printed["rows"]] == [
        (c, n) for c in both[1::2] for n in (1, 2, 4)
    ]
    assert (
        printed["rows"][2]["step"]
        == autopar.plan(model, devices=4, cluster="dgx-h100").predicted.step
    )
    assert (
        printed["rows"][0]["efficiency"] == 1.0
        and printed["rows"][3]["money"] is None
        and plot.read_text().startswith("<svg")
    )
    run(asked)
    shown = capsys.readouterr().out
    assert (
        shown.startswith("fastest: ")
        and "per money" in shown
        and "by the hour within 1.00 s" in shown
    )


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (["--devices", "1..4"], "give --cluster and --devices"),
        (
            ["--devices", "1..4", "--cluster", "dgx-h100", "--scheme", "data"],
            "one cluster and one number of devices",
        ),
        (
            ["--devices", "2", "--cluster", "dgx-h100", "--price", "dgx=2"],
            "unknown cluster of --price 'dgx': valid are dgx-h100",
        ),
        (["--devices", "2", "--cluster", "dgx-h100", "--price", "dgx-h100=free"], "is no number"),
        (
            ["--devices", "2", "--cluster", "dgx-h100", "--target-step", "soon"],
            "give 1.5, 1.5s or 500ms",
        ),
        (["--devices", "1,2", "--cluster", "dgx-h100", "--target-per-money", "3"], "needs --price"),
        (["--devices", "1,2", "--cluster", "dgx-h1000"], "unknown cluster 'dgx-h1000'"),
    ],
)
def test_mistakes_are_told(more: list[str], why: str, tmp_path: Path) -> None:
    model = str(tmp_path / "model.onnx")
    onnx.save(perceptrons(1), model)
    with pytest.raises(UsageError, match=why):
        run(["compare", model, *more])


def test_times() -> None:
    assert target_seconds("20 us") == pytest.approx(2e-5)
