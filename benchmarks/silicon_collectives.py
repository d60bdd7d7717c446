"""How far the prices of collectives are off on measured ones: on the points that no fit has seen, by device, collective and size."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from fitting.collective_rows import BIG, Row, collective_rows, devices
from rich.console import Console
from rich.table import Table

from autopar.costmodel import Cluster, bind_axes, collective_time, load_cluster
from autopar.errors import AutoparError

PRESETS: Mapping[str, str] = {
    "a100_sxm": "dgx-a100-80g", "h100_sxm": "dgx-h100", "h200_sxm": "hgx-h200", "b200_sxm": "dgx-b200", "b300_sxm": "dgx-b300",
    "gb200": "gb200-nvl72", "gb300": "gb300-nvl72", "l40s": "l40s", "rtx_pro_6000_server": "rtx-pro-6000",
}  # fmt: skip
"""The clusters that the devices of the rows stand in."""
WITHIN = 0.10
Score = tuple[str, str, int, float, float, float, float]
"""Device, kind of kernel, number of rows, median and 90th percentile of |error|, median error, share within 10 %."""


def predicted(rows: list[Row], cluster: Cluster) -> list[float]:
    """Seconds of each row by the cost model, among neighbouring devices."""
    found = []
    for row in rows:
        among = cluster.sized(row.group)
        (level,) = bind_axes(among, (row.group,)) or ("",)
        found.append(float(collective_time(row.kind, row.nbytes, row.group, level=level, cluster=among)))
    return found


def scored(device: str, kind: str, errors: list[float]) -> Score:
    """One line of the table."""
    sizes = np.abs(errors)
    median, most = float(np.median(sizes)), float(np.quantile(sizes, 0.9))
    return device, kind, len(errors), median, most, float(np.median(errors)), float(np.mean(sizes <= WITHIN))


def rows(data: Path, *, seen: bool = False) -> list[Score]:
    """The scores of every device that has a preset; `seen`: of the rows that were fitted to, in place of those held out."""
    found = []
    for device in devices(data):
        if device not in PRESETS:
            continue
        chosen = [row for row in collective_rows(data, device) if row.held_out != seen]
        times = predicted(chosen, load_cluster(PRESETS[device]))
        errors: dict[str, list[float]] = {}
        for row, seconds in zip(chosen, times, strict=True):
            size = "from 1 MiB" if row.nbytes >= BIG else "below 1 MiB"
            errors.setdefault(f"{row.kind} {size}", []).append(seconds / row.seconds - 1)
        found += [scored(device, kind, errors[kind]) for kind in sorted(errors)]
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, metavar="DIR", help="a folder of collectives_*.csv(.gz)")
    parser.add_argument("--seen", action="store_true", help="score the rows that were fitted to")
    arguments = parser.parse_args()
    try:
        scores = rows(arguments.data, seen=arguments.seen)
    except AutoparError as error:
        print(f"silicon_collectives: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    table = Table(title="Collectives, predicted against measured")
    for heading in ("device", "collective", "rows", "median", "90 %", "bias", "within 10 %"):
        table.add_column(heading, justify="left" if heading in ("device", "collective") else "right")
    for device, kind, count, median, most, bias, within in scores:
        table.add_row(device, kind, str(count), f"{median:.1%}", f"{most:.1%}", f"{bias:+.1%}", f"{within:.0%}")
    Console(width=100, highlight=False).print(table)


if __name__ == "__main__":
    main()
