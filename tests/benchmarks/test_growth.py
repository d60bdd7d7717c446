"""The benchmark of growth: its curves, their exponents and its figure."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import growth
from benchmarks.growth import Point, cases, exponent, panels, searched


def _curve(power: float, *sizes: int) -> list[Point]:
    return [
        Point(curve="devices", size=n, operators=9, seconds=n**power / 7, memory=1.0) for n in sizes
    ]


def test_an_exponent_is_that_of_the_upper_half() -> None:
    assert exponent(_curve(2.0, 1, 2, 4)) == pytest.approx(2.0)
    bent = [*_curve(0.0, 1, 2), *_curve(1.5, 64, 128, 256, 512)]
    assert exponent(bent) == pytest.approx(1.5)
    assert exponent(list(reversed(bent))) == pytest.approx(1.5)


def test_the_curves_reach_the_stated_sizes() -> None:
    made = list(cases(quick=False))
    assert max(size for curve, size, _ in made if curve == "devices") == 131_072
    assert [size for curve, size, _ in made if curve == "axes"] == [1, 2, 3, 4]
    assert all(case.devices == case.batch for curve, _, case in made if curve != "axes")
    assert len(list(cases(quick=True))) < len(made)


def test_a_point_is_a_whole_search() -> None:
    point = searched(0, quick=True)
    assert point.curve == "operators" and point.size == point.operators > 40
    assert point.seconds > 0 and point.memory > 0.01


def test_the_command_writes_its_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = _curve(1.0, 8, 64, 512)

    def measured(command: tuple[str, ...]) -> tuple[dict[str, float], str]:
        number = int(command[command.index("--point") + 1])
        point = made[number % len(made)]
        told = {name: getattr(point, name) for name in point.__dataclass_fields__}
        return {}, json.dumps(told)

    monkeypatch.setattr(growth, "measured", measured)
    monkeypatch.setattr("sys.argv", ["growth", "--quick", "--figure", str(tmp_path / "f.svg")])
    growth.main()
    assert "planning over devices: exponent 1.00" in capsys.readouterr().out
    drawn = ElementTree.parse(tmp_path / "f.svg").getroot()
    assert drawn.tag.endswith("svg")
    assert len(panels(made)) == 1


def test_points_of_an_earlier_run_are_drawn_and_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def measured(command: tuple[str, ...]) -> None:
        raise AssertionError(f"{command} is measured")

    monkeypatch.setattr(growth, "measured", measured)
    before = tmp_path / "points.jsonl"
    made = _curve(2.0, 8, 64, 512)
    before.write_text("".join(f"{json.dumps(asdict(point))}\n" for point in made))
    monkeypatch.setattr("sys.argv", ["growth", "--json", "--points", str(before)])
    growth.main()
    assert capsys.readouterr().out == before.read_text()
