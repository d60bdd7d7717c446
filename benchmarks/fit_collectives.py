"""Fits the links of `costmodel/presets/links` to collectives; reports errors on held-out rows.

`--data DIR` holds files collectives_DEVICE.csv or .csv.gz with the columns op, kind, dtype, gpus,
bytes, seconds, trap. The fit is seeded: the same rows give the same constants. `--published DIR`
has all-reduces over networks (`collectives.csv`) for network links, `--profiled DIR` collectives
that a planner measured inside nodes.
"""

from __future__ import annotations

import argparse
import csv
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from autopar.errors import AutoparError, UsageError, unknown
from benchmarks.fitting.link_fits import (
    COLLECTIVES,
    LINKS,
    Links,
    Result,
    fit_kind,
    links_file,
    rows_of,
    write,
)
from benchmarks.fitting.network_fit import network_file
from benchmarks.fitting.profiled_links import NODES, node_file
from benchmarks.validating.collectives import scored


def chosen(names: list[str]) -> tuple[Links, ...]:
    """The links of these names with those inside them, or all."""
    known = [links.name for links in LINKS]
    for name in names:
        if name not in known:
            raise UsageError(unknown("links", name, known))
    wanted = {links.name for links in LINKS if not names or links.name in names}
    for links in reversed(LINKS):
        wanted |= {links.inside} if links.name in wanted else set()
    return tuple(links for links in LINKS if links.name in wanted)


def told(links: Links, result: Result) -> str:
    """One line of the report."""
    return (
        f"{links.name:20} {result.kind:15} {result.rows:4} rows, off {result.error:6.1%} in the "
        f"median of {len(result.held_out)} others"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="DIR", help="a folder of collectives_*.csv(.gz)"
    )
    parser.add_argument(
        "--links", action="append", default=[], metavar="NAME", help="only these (repeatable)"
    )
    parser.add_argument(
        "--published",
        type=Path,
        metavar="DIR",
        help="a folder with collectives.csv: fit the networks to it, too",
    )
    parser.add_argument(
        "--profiled",
        type=Path,
        metavar="DIR",
        help="a folder with mist_collectives.csv.gz: fit the nodes of it, too",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the constants into costmodel/presets/links"
    )
    arguments = parser.parse_args()
    inside: dict[str, dict[str, list[float]]] = {"": {}}
    try:
        for links in chosen(arguments.links):
            rows = rows_of(links, arguments.data)
            before = inside[links.inside]
            results = [fit_kind(kind, rows, links, before) for kind in COLLECTIVES]
            inside[links.name] = {
                result.kind: result.fitted.overhead.tolist() for result in results
            }
            for result in results:
                print(told(links, result))
            if arguments.write:
                print(write(links.name, links_file(links, results, before)))
        if arguments.published:
            with (arguments.published / "collectives.csv").open() as file:
                network = network_file(scored(csv.DictReader(file)))
            print(
                network["efficiency"]["source"],
                f"off {network['efficiency']['error']:.1%} in the median of the rows fitted to",
            )
            if arguments.write:
                print(write("efa-p4d", network))
        for node in NODES if arguments.profiled else ():
            contents = node_file(arguments.profiled, node)
            efficiency = contents["efficiency"]
            print(
                f"{node.name:20} all_reduce      {efficiency['source']}: {efficiency['value']:.3f} "
                f"of the rate, off {efficiency['error']:.1%}"
            )
            if arguments.write:
                print(write(node.name, contents))
    except AutoparError as error:
        print(f"fit_collectives: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error


if __name__ == "__main__":
    main()
