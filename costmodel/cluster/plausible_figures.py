"""Plausible figures of a cluster: one a million times off the usual rate is a slip of the unit."""

from __future__ import annotations

from collections.abc import Mapping

Range = tuple[float, float]
TERA = 1e12

# By the last part of a figure's name: the least and the most ever built, with room on both sides,
# in base units.
RANGES: Mapping[str, tuple[Range, str]] = {
    "peak": ((1e5, 1e18), "FLOP/s"),
    "memory_bandwidth": ((1e6, 1e14), "B/s"),
    "memory_capacity": ((1e5, 1e14), "B"),
    "host_bandwidth": ((1e6, 1e13), "B/s"),
    "bandwidth": ((1e3, 1e13), "B/s"),
    "peer_bandwidth": ((1e3, 1e13), "B/s"),
    "copy_bandwidth": ((1e6, 1e14), "B/s"),
    "latency": ((0.0, 1.0), "s"),
    "overhead": ((0.0, 1.0), "s"),
    "launch": ((0.0, 0.1), "s"),
    "dispatch": ((0.0, 0.1), "s"),
}
# By a word in the name of a level: B/s one way of a port. NVLink 1 had 20 GB/s a link, NVLink 6 has
# 1.8 TB/s a device; a PCIe 1 lane 250 MB/s, PCIe 7 x 16 242 GB/s; a network port 1 Gbit/s to 1.6
# Tbit/s, several of which may make one.
LINKS: Mapping[str, Range] = {
    "nvlink": (1e10, 5 * TERA),
    "xgmi": (1e10, 5 * TERA),
    "infinity": (1e10, 5 * TERA),
    "pcie": (2e8, 3e11),
    "nic": (1e7, 1e12),
    "efa": (1e7, 1e12),
    "infiniband": (1e8, 1e12),
    "ethernet": (1e6, 1e12),
}
_PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def _text(value: float, unit: str) -> str:
    """A rate, size or time with a prefix.

    >>> _text(4.5e8, "B/s"), _text(0.1, "s")
    ('450 MB/s', '0.1 s')
    """
    scale, prefix = next(
        ((scale, prefix) for scale, prefix in _PREFIXES if abs(value) >= scale), (1.0, "")
    )
    return f"{value / scale:.4g} {prefix}{unit}"


def asked_back(where: str, value: float) -> str:
    """Return the question that an implausible figure raises, with the range and what to do.

    A plausible figure raises none: the text is empty.

    >>> asked_back("nvlink.bandwidth", 4.5e8).partition(":")[0]
    'nvlink.bandwidth is 450 MB/s'
    """
    owner, _, rest = where.partition(".")
    name = rest.split(".")[0] if owner == "device" else where.rpartition(".")[2]
    if name not in RANGES or not value > 0:
        return ""  # a figure that is not positive is refused elsewhere
    (low, high), unit = RANGES[name]
    what = "such figures are"
    if name == "bandwidth":
        low, high = next(
            (range_of_link for word, range_of_link in LINKS.items() if word in owner.lower()),
            (low, high),
        )
        what = "Such links have"
    if low <= value <= high:
        return ""
    what = what[0].upper() + what[1:]
    return (
        f"{where} is {_text(value, unit)}: is that its unit? {what} {_text(low, unit)} to "
        f"{_text(high, unit)}. "
        'If it is meant, add "unusual": true to the figure'
    )
