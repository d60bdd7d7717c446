"""The arguments of `autopar compare` over several clusters and numbers of devices."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import UsageError, unknown
from autopar.options.kinds import pair_of

from .shared_options import price_of

MOST_COUNTS = 16
"""The most numbers of devices of one cluster."""
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "": 1.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """A comparison over clusters and numbers of devices.

    `prices`: of a device and hour, by cluster. `target_step`: seconds of a step to reach.
    `target_per_money`: samples for a unit of money to reach.
    """

    clusters: tuple[str, ...]
    counts: tuple[int, ...]
    prices: Mapping[str, float]
    target_step: float | None
    target_per_money: float | None


def scaling_of(args: argparse.Namespace, counts: tuple[int, ...]) -> Scaling | None:
    """The comparison over several clusters or counts; None if one of each is asked about."""
    clusters = tuple(args.cluster)
    # A price without a cluster is that of the one cluster that schemes are compared on.
    by_cluster = [text for text in args.price if "=" in text]
    targets = by_cluster or args.plot or args.target_step or args.target_per_money
    if len(clusters) <= 1 and len(counts) <= 1 and not targets:
        return None
    for option in ("scheme", "tokens"):
        if getattr(args, option):
            raise UsageError(f"--{option} is for one cluster and one number of devices")
    if not (clusters and counts):
        raise UsageError(
            "give --cluster and --devices: which clusters, and how many devices of each (1..64)"
        )
    pairs = dict(pair_of(text, "--price", "CLUSTER=2.5") for text in args.price)
    prices = prices_of(pairs, clusters)
    if args.target_per_money is not None and not prices:
        raise UsageError("--target-per-money needs --price")
    return Scaling(
        clusters=clusters,
        counts=counts,
        prices=prices,
        target_step=target_seconds(args.target_step) if args.target_step else None,
        target_per_money=args.target_per_money,
    )


def counts_of(text: str) -> tuple[int, ...]:
    """Numbers of devices: "8", "8,16,24", or "1..64", the ends and the powers of two between.

    >>> counts_of("8"), counts_of("2,6"), counts_of("3..20")
    ((8,), (2, 6), (3, 4, 8, 16, 20))
    """
    parts = [_counts(part.strip()) for part in text.split(",")]
    counts = [count for part in parts if part is not None for count in part]
    if None in parts or not counts or min(counts) < 1:
        raise UsageError(
            f"--devices {text!r} is no number of devices: give 8, or several as 8,16,32 or 1..64"
        )
    unique = tuple(sorted(set(counts)))
    if len(unique) > MOST_COUNTS:
        raise UsageError(
            f"--devices {text} are {len(unique)} numbers of devices; "
            f"at most {MOST_COUNTS} are planned for at once"
        )
    return unique


def _counts(part: str) -> list[int] | None:
    """The numbers of a part between commas; none of an empty range, None if it is no number."""
    match = _RANGE.fullmatch(part)
    if match is None:
        return [int(part)] if part.isdecimal() and len(part) < 10 else None
    low = int(match[1])
    high = int(match[2])
    if low > high:
        return []
    return [low, *(2**n for n in range(31) if low < 2**n < high), high]


def prices_of(pairs: Mapping[str, str], clusters: Sequence[str]) -> dict[str, float]:
    """The prices of a device and hour by cluster."""
    for name in pairs:
        if name not in clusters:
            raise UsageError(unknown("cluster of --price", name, clusters))
    return {name: price_of(text, f"--price {name}={text}") for name, text in pairs.items()}


def target_seconds(text: str) -> float:
    """The seconds of a step to reach.

    >>> target_seconds("500ms"), target_seconds("1.5")
    (0.5, 1.5)
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*(s|ms|us|)\s*", text)
    if match is None or not float(match[1]) > 0:
        raise UsageError(f"--target-step {text!r} is no time: give 1.5, 1.5s or 500ms")
    return float(match[1]) * _SECONDS[match[2]]
