"""All groups of a folder.

Training runs by their group, single layers, memory, collectives by machine and by size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from .collectives import BIG, Point, scored
from .layers import layer_groups
from .megatron_files import experts_layer, golden, golden_group, simumax
from .mist import aceso, mist, stage_samples
from .processes import each
from .rows import Row, Table, read_tables, thinned, training_rows
from .sailor import layer_sample, sailor
from .scores import Group, Sample
from .seen import unseeing, without
from .training import attempted, training_groups, unprofiled_groups
from .variants import MOST


def all_groups(folder: Path, *, most: int | None = None) -> tuple[list[Group], list[str]]:
    """Groups of a folder, at most `most` training runs each, and the files that hold none."""
    tables, others = read_tables(folder)
    rows = training_rows(tables)
    chosen = thinned(rows, most) if most is not None else rows
    some = thinned(chosen, MOST)
    groups = [*training_groups(chosen), *unprofiled_groups(some)]
    layers = [group for table in tables if table.kind == "layers" for group in layer_groups(table)]
    files = [group for table in tables if table.kind in FILES for group in file_groups(table)]
    return [*groups, *files, *stage_groups(tables), *layers, *collective_groups(tables)], others


FILES: Mapping[str, Callable[[Row], list[tuple[str, Sample]]]] = {
    "golden": lambda row: [(golden_group(row), golden(row).sample())],
    "simumax": lambda row: [("simumax_b200", simumax(row).sample())],
    "mist": lambda row: [("mist_l4", mist(row).sample())],
    "aceso": lambda row: [(f"mist_aceso {row['gpu'].partition('-')[0]}", aceso(row).sample())],
    "sailor": lambda row: [
        ("sailor mixed" if row["heterogeneous"] == "1" else "sailor", sailor(row).sample())
    ],
    "sailor layers": lambda row: [layer_sample(row)],
    "experts": lambda row: [
        (f"megatron_moe_layer {name}", sample) for name, sample in experts_layer(row)
    ],
}
"""The samples of a row by group, for each kind of file."""


def file_groups(table: Table) -> list[Group]:
    """The groups of a file of runs."""
    samples: dict[str, list[Sample]] = {}
    left_out: Counter[str] = Counter()
    for priced in each(partial(_of_file, table.kind), table.rows):
        if isinstance(priced, str):
            left_out[priced] += 1
            continue
        for name, sample in priced:
            samples.setdefault(name, []).append(sample)
    for name in list(samples):
        if apart := without(name):
            samples[apart] = unseen(table, name)
    groups = [Group(name=name, samples=tuple(members)) for name, members in samples.items()]
    if groups:
        return [replace(groups[0], left_out=left_out), *groups[1:]]
    return [Group(name=table.name, samples=(), left_out=left_out)]


def _of_file(kind: str, row: Row) -> list[tuple[str, Sample]] | str:
    """The samples of a row of a file, or the reason why there are none."""
    return attempted(partial(FILES[kind], row))


def unseen(table: Table, name: str) -> list[Sample]:
    """The samples of a group without what was read off its rows or machines."""
    rows = [unseeing(row, name) for row in table.rows]
    priced = each(partial(_of_file, table.kind), rows)
    return [
        sample
        for one in priced
        if not isinstance(one, str)
        for group, sample in one
        if group == name
    ]


def stage_groups(tables: Sequence[Table]) -> list[Group]:
    """The stages of plans that are in a file of their own, by device."""
    rows = [row for table in tables if table.kind == "stages" for row in table.rows]
    plans = [row for table in tables if table.kind == "aceso" for row in table.rows]
    samples, left_out = stage_samples(rows, plans)
    groups = []
    for device, members in samples.items():
        name = f"mist_aceso stages {device}"
        groups.append(Group(name=name, samples=tuple(members)))
        if apart := without(name):
            unseen_plans = [unseeing(row, name) for row in plans if row["gpu"].startswith(device)]
            again, _ = stage_samples(rows, unseen_plans)
            groups.append(Group(name=apart, samples=tuple(again[device])))
    return [replace(groups[0], left_out=left_out), *groups[1:]] if groups else []


def collective_groups(tables: Sequence[Table]) -> list[Group]:
    """A group for each machine, and all together by size.

    The null model is a constant number of bytes a second.
    """
    rows = [row for table in tables if table.kind == "collectives" for row in table.rows]
    if not rows:
        return []
    machines: dict[str, list[Point]] = {}
    left_out: Counter[str] = Counter()
    for row in rows:
        sample = attempted(partial(scored, [row]))
        if isinstance(sample, str):
            left_out[sample] += 1
            continue
        for name, part in sample.items():
            left_out.update(part.left_out)
            if part.points:
                machines.setdefault(name, []).extend(part.points)
    large = []
    small = []
    parts = []
    for name, points in machines.items():
        samples = [collective(name, point) for point in points]
        large += [s for s, point in zip(samples, points, strict=True) if point.size >= BIG]
        small += [s for s, point in zip(samples, points, strict=True) if point.size < BIG]
        parts.append(Group(name=f"collectives, {name}", samples=tuple(samples)))
        parts.extend(unfitted(f"collectives, {name}", rows))
    return [
        Group(name="collectives from 1 MiB", samples=tuple(large), left_out=left_out),
        Group(name="collectives below 1 MiB", samples=tuple(small)),
        *parts,
    ]


def unfitted(group: str, rows: Sequence[Row]) -> list[Group]:
    """The group of a machine without what was read off it, if anything was."""
    apart = without(group)
    if not apart:
        return []
    machine = group.removeprefix("collectives, ")
    points = scored(unseeing(row, group) for row in rows)[machine].points
    samples = tuple(collective(machine, point) for point in points)
    return [Group(name=apart, samples=samples)]


def collective(machine: str, point: Point) -> Sample:
    """A point as a sample."""
    return Sample(
        label=f"{machine}: {point.label}",
        measured=point.measured,
        predicted=point.predicted,
        work=point.size,
    )
