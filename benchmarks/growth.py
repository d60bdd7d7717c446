"""How the cost of planning grows: CPU seconds and memory over operators, devices and axes.

    benchmarks/growth.py [--quick] [--json] [--figure FILE] [--points FILE]

Every point is a whole search for a plan of a transformer with the layers of Llama-3-8B, in a
process of its own with one thread of arithmetic. Its memory is the peak of that process.
`--points`: lines of an earlier `--json`, which are drawn and not measured again. Each curve varies
one size:

    operators  the layers, on 1,024 devices and 1,024 sequences
    devices    the devices, with a sequence for each, and 32 layers
    axes       the axes of a mesh of 16 devices without stages, and 32 layers

The exponent of a curve is the slope b of log(seconds) = a + b log(size), by least squares over the
upper half of its sizes, as a constant is most of the seconds of the lower ones.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.report.plot import Panel, Series, svg
from benchmarks.planned.cases import Case
from benchmarks.planning import measured

LAYERS = (2, 8, 32, 128, 512, 4350)
DEVICES = (8, 64, 512, 4096, 32768, 131072)
MESHES = ((16,), (4, 4), (4, 2, 2), (2, 2, 2, 2))
QUICK = 3
"""The points of a quick curve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A search: its size on the curve, its seconds with reading nothing, and the peak in GB."""

    curve: str
    size: int
    operators: int
    seconds: float
    memory: float


def cases(*, quick: bool) -> Iterator[tuple[str, int, Case]]:
    """A curve's name, a size (0: that of its operators), and what is planned."""
    most = QUICK if quick else None
    for layers in LAYERS[:most]:
        case = Case(name="", model="llama3_8b", layers=layers, batch=1024, devices=1024)
        yield "operators", 0, case
    for devices in DEVICES[:most]:
        case = Case(name="", model="llama3_8b", layers=32, batch=devices, devices=devices)
        yield "devices", devices, case
    for mesh in MESHES[:most]:
        case = Case(
            name="", model="llama3_8b", layers=32, batch=16, devices=16, mesh=mesh, stages=1
        )
        yield "axes", len(mesh), case


def searched(number: int, *, quick: bool) -> Point:
    """The point of that number, in this process."""
    from autopar.planning.planner import search_plan
    from benchmarks.planned.cases import graph_of, request_of

    curve, size, case = list(cases(quick=quick))[number]
    graph = graph_of(case, Path())
    start = time.process_time()
    search_plan(graph, request_of(case, graph))
    return Point(
        curve=curve,
        size=size or len(graph.operators),
        operators=len(graph.operators),
        seconds=time.process_time() - start,
        memory=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
    )


def points_now(*, quick: bool) -> Iterator[Point]:
    """Measure all points, each in a process of its own."""
    for number, _ in enumerate(cases(quick=quick)):
        more = ("--quick",) if quick else ()
        _, text = measured((sys.executable, __file__, "--point", str(number), *more))
        yield Point(**json.loads(text.splitlines()[-1]))


def points_of(file: Path) -> Iterator[Point]:
    """The points that an earlier run printed."""
    for line in file.read_text().splitlines():
        yield Point(**json.loads(line))


def exponent(points: Sequence[Point]) -> float:
    """The slope of log(seconds) over log(size), for the upper half of a curve."""
    upper = sorted(points, key=lambda point: point.size)[len(points) // 2 - 1 :]
    xs = [math.log(point.size) for point in upper]
    ys = [math.log(point.seconds) for point in upper]
    middle = sum(xs) / len(xs)
    squares = sum((x - middle) ** 2 for x in xs)
    return sum((x - middle) * y for x, y in zip(xs, ys, strict=True)) / squares


def panels(points: Sequence[Point]) -> list[Panel]:
    """A plot of seconds and memory for each curve, with its exponent."""
    drawn = []
    for curve in dict.fromkeys(point.curve for point in points):
        mine = [point for point in points if point.curve == curve]
        lines = (
            ("CPU seconds", [(float(p.size), p.seconds) for p in mine]),
            ("memory (GB)", [(float(p.size), p.memory) for p in mine]),
        )
        series = tuple(
            Series(name=name, colour=i, joined=True, points=tuple(line))
            for i, (name, line) in enumerate(lines)
        )
        title = f"planning over {curve}: exponent {exponent(mine):.2f}"
        drawn.append(Panel(title=title, x=curve, y="", series=series))
    return drawn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the first points of each curve")
    parser.add_argument("--json", action="store_true", help="print one JSON object a point")
    parser.add_argument("--figure", type=Path, help="write the curves as SVG")
    parser.add_argument("--points", type=Path, help="draw the points of an earlier --json")
    parser.add_argument("--point", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.point is not None:
        print(json.dumps(asdict(searched(options.point, quick=options.quick))))
        return
    points = []
    for point in points_of(options.points) if options.points else points_now(quick=options.quick):
        points.append(point)
        told = f"{point.curve:<10} {point.size:>8,} {point.seconds:8.1f} s {point.memory:6.2f} GB"
        print(json.dumps(asdict(point)) if options.json else told, flush=True)
    if not options.json:
        for panel in panels(points):
            print(panel.title)
    if options.figure:
        options.figure.write_text(svg(panels(points)))


if __name__ == "__main__":
    main()
