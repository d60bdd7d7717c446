"""Errors of the constants of measured devices and links.

Predicted and measured seconds of rows that no fit saw.

Two tables: kernels (products, attention, layers of experts) on the shapes that `fit_devices.py`
held back, and collectives on the points that `fit_collectives.py` held out. A row is priced for the
library that ran it; "as planned" is the median error of prices that do not know the library.
"inside" is the share of the rows in the stated 90 % intervals, which come from other rows. Rows of
kernels that were not fitted are counted as not priced.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.costmodel.device.measured_kernels import measured
from autopar.errors import AutoparError, UsageError
from benchmarks.fitting.collective_rows import devices
from benchmarks.fitting.collective_scores import collective_scores
from benchmarks.kernels.bounds import bounds, shown_bounds
from benchmarks.kernels.judging import KINDS, kernel_scores
from benchmarks.kernels.rows import devices_in
from benchmarks.kernels.scores import held_in, shown

QUICK = ("h100_sxm", "b200_sxm")
"""The devices that --quick looks at."""


def devices_of(folder: Path, *, quick: bool) -> tuple[list[str], list[str]]:
    """The devices with tables of kernels, and those with tables of collectives."""
    kernels = {device for kind, _ in KINDS for device in devices_in(folder, kind)} & set(measured())
    collectives = set(devices(folder))
    if not kernels | collectives:
        raise UsageError(
            f"{folder} has no tables gemm_*, attention_*, moe_* or collectives_* of "
            f"{', '.join(measured())}"
        )
    wanted = set(QUICK) if quick else kernels | collectives
    return sorted(kernels & wanted), sorted(collectives & wanted)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="DIR",
        help="a folder of tables of kernels and collectives",
    )
    parser.add_argument("--quick", action="store_true", help=f"only {' and '.join(QUICK)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    try:
        kernels, collectives = devices_of(arguments.data, quick=arguments.quick)
        tables = {
            "kernels": [one for device in kernels for one in kernel_scores(arguments.data, device)],
            "collectives": [
                one for device in collectives for one in collective_scores(arguments.data, device)
            ],
        }
    except AutoparError as error:
        print(f"silicon: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    best = [one for device in kernels for one in bounds(arguments.data, device)]
    if arguments.json:
        rows = [{"table": name, **asdict(one)} for name, scores in tables.items() for one in scores]
        inside = {name: held_in(scores) for name, scores in tables.items()}
        print(
            json.dumps(
                {"rows": rows, "inside": inside, "bounds": [asdict(one) for one in best]},
                allow_nan=False,
            )
        )
        return
    for name, scores in tables.items():
        if scores:
            shown(f"{name.capitalize()}, predicted against measured on rows held out", scores)
    shown_bounds(best)


if __name__ == "__main__":
    main()
