"""Constants that were read off measurements of the very machines or runs that are scored.

`READ` names every such constant with its place and the groups that it has seen. Where it can be
taken away, its groups are scored a second time without it (`without`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

UNFITTED = "unfitted"
"""The name of a row's cell with what its price is not to know: constants of `READ`, by what they
are, or one of the next two.
"""
KERNELS = "kernels"
"""All that was measured of the kernels of a row's device."""
PROFILE = "profile"
"""The habits of a row's framework."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """A constant that was read off measurements.

    `what`: as the table calls it. `place`: the file that holds it. `words`: those of its source
    there. `groups`: patterns of the names of groups on the same rows or the same machines.
    `runs`: whether it was read off runs that are scored, not off kernels or links of the machine.
    `apart`: whether the groups are scored without it, too; `reason` says why they are not.
    """

    what: str
    place: str
    words: str
    groups: tuple[str, ...]
    runs: bool = False
    apart: bool = False
    reason: str = ""


READ = (
    Read(
        what="network",
        place="benchmarks/validating/machines.py",
        words="fitted to the sweep",
        groups=("bloom*",),
        runs=True,
        apart=True,
    ),
    Read(
        what="gather rate",
        place="costmodel/frameworks/table.py",
        words="published runs come to",
        groups=("sc21_t2*",),
        runs=True,
        apart=True,
    ),
    Read(
        what="link",
        place="costmodel/presets/links/efa-p4d.json",
        words="awslabs/awsome-distributed-training@0edaf152",
        groups=("collectives, p4de*",),
        apart=True,
    ),
    Read(
        what="memory in use",
        place="costmodel/presets/dgx-a100-80g.json",
        words="422 published runs",
        groups=("alephalpha*",),
        runs=True,
        apart=True,
    ),
    Read(
        what="operators",
        place="costmodel/presets/l4.json",
        words="Dazz993/Mist@d69e530a",
        groups=("mist_l4*", "mist_aceso L4*", "mist_aceso stages L4*"),
        apart=True,
    ),
    Read(
        what="operators",
        place="costmodel/presets/g5.json",
        words="Dazz993/Mist@d69e530a",
        groups=("mist_aceso A10G*", "mist_aceso stages A10G*"),
        apart=True,
    ),
    Read(
        what="elementwise",
        place="costmodel/presets/dgx-a100-80g.json",
        words="Dazz993/Mist@d69e530a",
        groups=("mist_aceso A100*", "mist_aceso stages A100*"),
        apart=True,
    ),
    Read(
        what="links",
        place="benchmarks/validating/sailor.py",
        words="from splitting profiled layers of",
        groups=("sailor mixed*", "sailor_layers split*"),
        reason="nobody states how the devices of these hosts are joined",
    ),
    Read(
        what="host",
        place="benchmarks/validating/sailor.py",
        words="26 calls of the host",
        groups=("sailor", "sailor without*", "sailor_layers whole", "sailor_layers split"),
        apart=True,
    ),
    Read(
        what="float32",
        place="benchmarks/validating/sailor.py",
        words="18 of the 19.5 TFLOP/s",
        groups=("sailor_layers OPT-30 whole*",),
        reason="how its products read float32 was seen in these very rows",
    ),
    Read(
        what="its node",
        place="benchmarks/validating/machines.py",
        words="MooreThreads/SimuMax@4dcaae51",
        groups=("simumax_b200*",),
        reason="tables of kernels and messages of the node, not of its runs",
    ),
)


def seen_by(group: str) -> tuple[Read, ...]:
    """The constants that have seen a group; those that it is scored without count no more."""
    apart = " without its " in group
    return tuple(
        read
        for read in READ
        if any(fnmatchcase(group, name) for name in read.groups) and not (apart and read.apart)
    )


def saw(group: str) -> str:
    """The constants that have seen a group, in words."""
    return ", ".join(read.what for read in seen_by(group)) or "no"


def without(group: str) -> str:
    """The name of the group of the same rows without what it has seen, or none."""
    apart = [read.what for read in seen_by(group) if read.apart]
    return f"{group} without its {' and '.join(apart)}" if apart else ""


def unseeing(row: Mapping[str, str], group: str, *others: str) -> Mapping[str, str]:
    """The row, with a cell that takes away what its group has seen, and `others`."""
    names = {read.what for read in seen_by(group) if read.apart} | {*others}
    return {**row, UNFITTED: ", ".join(sorted(names))}


def taken_away(row: Mapping[str, str]) -> frozenset[str]:
    """The names of all that the price of a row is not to know."""
    return frozenset(row.get(UNFITTED, "").split(", ")) - {""}
