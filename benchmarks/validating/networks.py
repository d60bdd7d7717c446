"""The network between the nodes of a published run, by the words of its row.

    [ports x] rate unit [words] [per node or per device]

A rate without a number of ports is that of the whole node, unless the words say that each device
has it, the machine is one whose devices have such ports each, or no port is as fast. A name of a
generation stands for the rate of a port, of which each device has one. Rates of links inside a node
do not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from .missing import Missing

RATE = re.compile(
    r"(?:(?P<ports>\d+)\s*[x×*]\s*)?(?:[A-Za-z-]+\s+)?(?P<rate>\d+(?:\.\d+)?)\s*(?P<unit>[TG])"
    r"(?:(?P<bytes>B(?:/s|ps)|bytes/s)|E\b|b(?:E|ps|it/?s?|/s)?|igabit|\b)"
)
GENERATION = re.compile(r"\b(?:(?P<ports>\d+)\s*[x×*]\s*)?(?P<name>EDR|HDR|NDR|XDR)\b")
GENERATIONS = {"EDR": 100, "HDR": 200, "NDR": 400, "XDR": 800}
"""Gbit/s of a port of four lanes (InfiniBand Trade Association's roadmap)."""
FASTEST = 800e9 / 8
"""B/s of the fastest port that a node had by 2026 (NVIDIA ConnectX-8); faster ones are a sum."""
KINDS = re.compile(r"\b(IB|InfiniBand|RoCE|RDMA|EFA|Ethernet|TCP|OPA|Omni-Path)\b", re.IGNORECASE)
OF_A_NODE = re.compile(r"(?:per|/|a)\s*node\b", re.IGNORECASE)
EACH = re.compile(r"(?:per|/|a|each)\s*(?:GPU|device|accelerator|rank)\b|per-GPU", re.IGNORECASE)
INSIDE = ("nvlink", "nvswitch", "nvl", "pcie", "xgmi", "infinity fabric")
ONE_PORT = "one port a node"
"""Words that stand for one port of the usual rate."""
ALONE = ("single node", "one node", "1 node", "none")
"""Words of runs without a network."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The ports of a node.

    `rate`: B/s one way of a port; `shared_by`: devices that share it. `stated`: whether the row
    says how many ports there are.
    """

    rate: float
    shared_by: int
    stated: bool = True


def network_of(text: str, devices: int, usual: float = 0.0) -> Network | None:
    """The network that a row names, between nodes of as many devices; None if it gives no rate.

    `usual`: B/s of the port that each device of such a machine has.

    >>> network_of("8x200Gb HDR IB/node (Selene)", 8)
    Network(rate=25000000000.0, shared_by=1, stated=True)
    >>> network_of("100Gb/s InfiniBand", 8)
    Network(rate=12500000000.0, shared_by=8, stated=False)
    """
    if runs_alone(text) or not text.strip():
        return None
    # What joins the devices of a node is described by the preset.
    parts = re.split(r"[;,+]|\band\b", text)
    parts = [part for part in parts if not any(word in part.lower() for word in INSIDE)]
    if not parts:
        return None
    for part in parts:
        if match := RATE.search(part):
            per_second = float(match["rate"]) * (1e12 if match["unit"] == "T" else 1e9)
            rate = per_second if match["bytes"] else per_second / 8
            each = bool(EACH.search(part))
            stated = bool(match["ports"] or each or rate > FASTEST or OF_A_NODE.search(part))
            each = each or (not stated and rate == usual)
            return _shared(rate, match["ports"], each, devices, stated=stated)
        if match := GENERATION.search(part):
            rate = GENERATIONS[match["name"]] * 1e9 / 8
            return _shared(rate, match["ports"], not match["ports"], devices, stated=False)
    if any(KINDS.search(part) for part in parts):
        return None
    raise Missing(f"network not described: {text}")


def _shared(rate: float, ports: str | None, each: bool, devices: int, *, stated: bool) -> Network:
    """The network of so many ports, or of one for each device."""
    if not ports and rate > FASTEST and not each:
        return Network(rate=rate / devices, shared_by=1, stated=stated)
    count = devices if each else int(ports or 1)
    if count >= devices:
        return Network(rate=rate * count / devices, shared_by=1, stated=stated)
    shared_by = -(-devices // count)
    return Network(rate=rate * count * shared_by / devices, shared_by=shared_by, stated=stated)


def runs_alone(text: str) -> bool:
    """Whether a row says that its run had no network."""
    return text.strip().lower().startswith(ALONE)
