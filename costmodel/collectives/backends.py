"""The algorithms of each backend: those of NCCL and of Gloo for every collective, as data.

NCCL (2.18 and later): rings and double trees for an all-reduce, reduction in an NVLink switch if
there is one, rings for the rest, PAT (2.23 and later) for gathers and scattered reductions among
devices on different nodes, grouped sends and receives where there is no collective. NCCL picks what
its own model holds for the fastest, as `lines` does. The rates of its protocols (LL, LL128, Simple:
`Level.protocols`) belong to the hardware. Steps as in its src/graph/tuning.cc: a tree is a chain
inside a node.

Gloo (torch 2.13): see the comments in its rows.
"""

from __future__ import annotations

from collections.abc import Mapping

from autopar.costmodel.cluster.protocols import KINDS

from .algorithm import Algorithm, log2_up, share


def _ring(rounds: int, layout: str = "channels") -> Algorithm:
    """Return a ring of `rounds` rounds: one to gather or to reduce-scatter, two for both.

    A device's own part stays.
    """
    return Algorithm(
        name="ring",
        layout=layout,
        steps=lambda n: rounds * (n - 1),
        traffic=lambda n: rounds * share(n),
        own=lambda n: rounds / n,
    )


# Each half of the buffer goes up one of two trees and down again: their n - 1 edges carry half of
# it each way, which makes 2 (n - 1) / n of it for a port on the average. Inside a node a tree is a
# chain.
_TREE = Algorithm(
    name="tree",
    layout="nested",
    steps=lambda n: 2 * log2_up(n),
    traffic=lambda n: 2 * share(n),
    own=lambda n: 2 / n,
    inner_steps=lambda n: 2 * (n - 1),
)
# The switch adds up a share for each device, which sends it back through the switch to all: 1 + 1/n
# each way.
_IN_SWITCH = Algorithm(
    name="in-switch",
    layout="nested",
    steps=lambda n: 2,
    traffic=lambda n: 1 + 1 / n,
    feature="in_switch",
)
# Parallel aggregated trees: recursive doubling in the order that needs the least buffers (NCCL
# 2.23, src/device/all_gather.h).
_PAT = Algorithm(
    name="pat",
    layout="nested",
    steps=log2_up,
    traffic=share,
    own=lambda n: 1 / n,
    feature="pat",
    apart=True,
)
_CHAIN = Algorithm(name="ring", layout="channels", steps=lambda n: n - 1, traffic=lambda n: 1.0)
# A message to each peer. Many are sent at once, so a step is the cost of starting one more.
_PEERS = Algorithm(
    name="peer to peer", layout="direct", steps=lambda n: n - 1, traffic=share, own=lambda n: 1 / n
)
_ALL_AT_ONCE = Algorithm(name="all at once", layout="direct", steps=lambda n: 1, traffic=share)
_MESSAGE = Algorithm(name="message", layout="message", steps=lambda n: 1, traffic=lambda n: 1.0)

TABLE: Mapping[str, Mapping[str, tuple[Algorithm, ...]]] = {
    "nccl": {
        "all_reduce": (_ring(2), _TREE, _IN_SWITCH),
        "all_gather": (_ring(1), _PAT),
        "reduce_scatter": (_ring(1), _PAT),
        "all_to_all": (_PEERS,),
        "broadcast": (_CHAIN,),
        "reduce": (_CHAIN,),
        "gather": (_PEERS,),
        "scatter": (_PEERS,),
        "send": (_MESSAGE,),
        "barrier": (
            Algorithm(
                name="tree",
                layout="nested",
                steps=_TREE.steps,
                traffic=lambda n: 0.0,
                inner_steps=_TREE.inner_steps,
            ),
        ),
    },
    "gloo": {
        "all_reduce": (_ring(2, "flat"),),
        "all_gather": (_ring(1, "flat"),),
        # Gloo reduces the whole buffer and keeps a part of it.
        "reduce_scatter": (_ring(2, "flat"),),
        "all_to_all": (_ALL_AT_ONCE,),
        "broadcast": (
            Algorithm(name="binomial tree", layout="flat", steps=log2_up, traffic=log2_up),
        ),
        "reduce": (
            Algorithm(
                name="ring and gather",
                layout="flat",
                steps=lambda n: n,
                traffic=lambda n: 2 * share(n),
            ),
        ),
        "gather": (_ALL_AT_ONCE,),
        "scatter": (_ALL_AT_ONCE,),
        "send": (_MESSAGE,),
        "barrier": (
            Algorithm(name="dissemination", layout="flat", steps=log2_up, traffic=lambda n: 0.0),
        ),
    },
}
assert all(tuple(table) == KINDS for table in TABLE.values())
