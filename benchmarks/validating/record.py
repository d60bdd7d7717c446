"""The record of all predictions beside their measurements, from which the page's tables follow.

A line is a run in one way of pricing it. The file is inside the repository, so that tables,
intervals and the chance to fit can be checked where the published rows are not.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from .rows import Row, Run
from .scores import Group, Sample
from .sizes import DATA
from .variants import AS_IT_RAN, Priced

RECORD = DATA / "predictions.csv"
SAMPLED = DATA / "sampled_rows.csv"
"""A published row of each group as its source has it, to be priced again."""
COLUMNS = (
    "how",
    "group",
    "row",
    "kind",
    "device",
    "devices",
    "measured_s",
    "predicted_s",
    "measured_bytes",
    "predicted_bytes",
    "ran_out",
    "told_out",
)


def write_record(path: Path, priced: Priced) -> None:
    """Write all samples that have something to compare."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for how, groups in priced.items():
            for group in groups:
                writer.writerows(
                    _line(how, group.name, s)
                    for s in group.samples
                    if s.timed or (how == AS_IT_RAN and (s.memory or s.was_oom))
                )


def write_sampled(path: Path, rows: Sequence[tuple[Row, Run]], priced: Priced) -> None:
    """Write the first row of each group that has a line in the record in every way."""
    lines = [{s.label.split()[0] for g in groups for s in g.samples} for groups in priced.values()]
    everywhere = set[str].intersection(*lines) if lines else set[str]()
    chosen: dict[str, Row] = {}
    for row, run in rows:
        if run.id in everywhere:
            chosen.setdefault(run.group, row)
    with path.open("w", encoding="utf-8", newline="") as file:
        columns = list(dict.fromkeys(name for row in chosen.values() for name in row))
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        writer.writerows(chosen.values())


def _line(how: str, group: str, s: Sample) -> list[str]:
    return [
        how,
        group,
        s.label.partition(":")[0],
        s.kind,
        s.device,
        f"{s.scale.get('devices', 0):.0f}",
        _figure(s.measured),
        _figure(s.predicted),
        _figure(s.memory),
        _figure(s.told_memory if s.memory else None),
        _flag(s.was_oom),
        _flag(s.told_oom),
    ]


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _flag(value: bool | None) -> str:
    return "" if value is None else str(int(value))


def read_record(path: Path = RECORD) -> Priced:
    """The groups of a record by how they were priced."""
    samples: dict[str, dict[str, list[Sample]]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            groups = samples.setdefault(line["how"], {})
            groups.setdefault(line["group"], []).append(_sample(line))
    return {how: list(_groups(groups)) for how, groups in samples.items()}


def _groups(samples: dict[str, list[Sample]]) -> Iterator[Group]:
    for name, members in samples.items():
        yield Group(name=name, samples=tuple(members))


def _sample(line: dict[str, str]) -> Sample:
    def figure(name: str) -> float | None:
        return float(line[name]) if line[name] else None

    def flag(name: str) -> bool | None:
        return line[name] == "1" if line[name] else None

    return Sample(
        label=line["row"],
        kind=line["kind"],
        device=line["device"],
        scale={"devices": float(line["devices"])},
        measured=figure("measured_s"),
        predicted=figure("predicted_s"),
        memory=figure("measured_bytes"),
        told_memory=figure("predicted_bytes"),
        was_oom=flag("ran_out"),
        told_oom=flag("told_out"),
    )
