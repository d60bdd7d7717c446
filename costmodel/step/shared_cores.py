"""Steps of ranks that share the cores of one host.

Prices are measured while all n ranks of a host are at work. On c < n cores a rank that waits leaves
its share of a core to the others, which are faster meanwhile, and a collective, whose bytes the
cores copy, hides under nothing. The cores do all the work that there is, and no rank is faster than
on a core of its own:

    step = max(u T, W)        u = c / n
                              T: the step at those prices
                              W: mean over the ranks of the seconds they are busy

(The two bounds of list scheduling; R. Graham, SIAM J. Appl. Math. 17, 1969.) With a core for every
rank u is 1, and the step is T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.costmodel.cluster.cluster import Cluster

INTERRUPTION = 1.2e-3
"""Seconds by which one more message lengthens the step of ranks that compute on the same cores.

Measured with torch 2.13, Gloo and GPT-2 for two data-parallel ranks on two cores: 64 ms for about
45 messages more at width 512, 13 ms for 11 at width 128. A message by itself takes 0.18 ms.
"""


def hides(cluster: Cluster) -> bool:
    """Whether collectives can run under computation: not where both take turns on a core."""
    return cluster.core_share == 1.0


def hidden_messages(cluster: Cluster, *, per_pass: bool) -> tuple[bool, bool]:
    """Whether gathers of parameters, and reductions of gradients, run under computation.

    `per_pass`: those of every pass (ZeRO 3), not those of once a step. It is a habit of the
    framework that runs the plan, but nothing hides where a rank has no core of its own.
    """
    gathers, reductions = cluster.framework.hides(per_pass=per_pass)
    return hides(cluster) and gathers, hides(cluster) and reductions


def shared_seconds(cluster: Cluster, seconds: float, busy: Sequence[float]) -> float:
    """Return the step of ranks that are `busy` for so many seconds each.

    It takes `seconds` at the prices of all ranks at work.
    """
    share = cluster.core_share
    return seconds if share == 1.0 else max(share * seconds, math.fsum(busy) / len(busy))
