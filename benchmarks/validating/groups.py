"""All groups of a folder: training runs by the group that they name, single layers, memory, collectives by machine and by size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from .collectives import BIG, Point, scored
from .layers import layer_groups
from .published_memory import memory_groups
from .rows import Table, read_tables, thinned, training_rows
from .scores import Group, Sample
from .training import attempted, training_groups


def all_groups(folder: Path, *, most: int | None = None) -> tuple[list[Group], list[str]]:
    """The groups of a folder, of at most `most` training runs each, and the files that hold none."""
    tables, others = read_tables(folder)
    rows = training_rows(tables)
    groups = training_groups(thinned(rows, most) if most is not None else rows)
    layers = [group for table in tables if table.kind == "layers" for group in layer_groups(table)]
    memory = [group for table in tables if table.kind == "memory" for group in memory_groups(table, rows)]
    return [*groups, *layers, *memory, *collective_groups(tables)], others


def collective_groups(tables: Sequence[Table]) -> list[Group]:
    """A group for each machine, and all together by size. The null model is a constant number of bytes a second."""
    rows = [row for table in tables if table.kind == "collectives" for row in table.rows]
    if not rows:
        return []
    machines: dict[str, list[Point]] = {}
    left_out: Counter[str] = Counter()
    for row in rows:
        found = attempted(partial(scored, [row]))
        if isinstance(found, str):
            left_out[found] += 1
            continue
        for name, part in found.items():
            left_out.update(part.left_out)
            if part.points:
                machines.setdefault(name, []).extend(part.points)
    large, small, parts = [], [], []
    for name, points in machines.items():
        samples = [collective(name, point) for point in points]
        large += [s for s, point in zip(samples, points, strict=True) if point.size >= BIG]
        small += [s for s, point in zip(samples, points, strict=True) if point.size < BIG]
        parts.append(Group(name=f"collectives, {name}", samples=tuple(samples)))
    return [
        Group(name="collectives from 1 MiB", samples=tuple(large), left_out=left_out),
        Group(name="collectives below 1 MiB", samples=tuple(small)),
        *parts,
    ]


def collective(machine: str, point: Point) -> Sample:
    """A point as a sample."""
    return Sample(label=f"{machine}: {point.label}", measured=point.measured, predicted=point.predicted, work=point.size)
