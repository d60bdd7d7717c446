"""The table of the races, as text and as a section of a page."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from .races import Row

GIB = 2**30
BEGIN = "<!-- planners: begin -->"
END = "<!-- planners: end -->"
HEAD = (
    "planner",
    "its search",
    "model",
    "devices or mesh",
    "CPU s",
    "peak GiB",
    "its step",
    "ours, CPU s",
    "peak GiB",
    "our step",
    "ratio of CPU s",
    "remark",
)


def number(value: float | None, digits: int = 3) -> str:
    """A number of that many significant digits; a dash for none."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if value < 1000 else f"{value:.0f}"


def gib(value: float | None) -> str:
    """Bytes in GiB."""
    return number(None if value is None else value / GIB, 2)


def cells(row: Row) -> tuple[str, ...]:
    """The cells of a row, in the order of `HEAD`."""
    return (
        row.rival,
        row.solver,
        row.model,
        row.devices,
        number(row.rival_s),
        gib(row.rival_memory),
        number(row.rival_step_s),
        number(row.ours_s),
        gib(row.ours_memory),
        number(row.ours_step_s),
        number(row.ratio),
        row.remark,
    )


def markdown(rows: Sequence[Row]) -> str:
    """The table."""
    lines = ["| " + " | ".join(HEAD) + " |", "|" + "---|" * len(HEAD)]
    lines += [
        "| " + " | ".join(cell.replace("|", "/") for cell in cells(row)) + " |" for row in rows
    ]
    return "\n".join(lines)


def state_of(checkout: Path) -> str:
    """The commit of a checkout, as its folder or its file `COMMIT` says."""
    file = checkout / "COMMIT"
    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    done = subprocess.run(
        ["git", "-C", str(checkout), "rev-parse", "HEAD"],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def section(rows: Sequence[Row], checkouts: Mapping[str, Path]) -> str:
    """The table with the states of the planners, between the marks of the page."""
    present = dict.fromkeys(row.rival for row in rows)
    states: Iterable[str] = (
        f"{rival} at `{state_of(checkouts[rival])[:12]}`" for rival in present if rival in checkouts
    )
    return "\n".join([BEGIN, "", markdown(rows), "", f"States: {'; '.join(states)}.", "", END])


def with_section(page: str, text: str) -> str:
    """The page with its section between the marks replaced; raises `ValueError` without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the marks {BEGIN} and {END}")
    return before + text + after
