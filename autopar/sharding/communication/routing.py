"""The expected number of ranks or nodes on which the experts of a token lie, in closed form.

Experts lie in order on equal domains (ranks, or nodes). A token has k of them, each choice as
likely as any other, from g of G groups of experts that are drawn first, each choice as likely (one
group: all experts). A domain with o experts of open groups is missed with the probability

    C(open experts - o, k) / C(open experts, k)

and o follows from the open groups that overlap the domain. Imbalance of routing is not in it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from autopar.errors import UsageError


@functools.lru_cache(maxsize=4096)
def domains_of_a_token(
    experts: int, top_k: int, domains: int, *, groups: int = 1, open_groups: int = 1
) -> float:
    """Return the mean number of `domains` that have some of the `top_k` experts of a token.

    >>> round(domains_of_a_token(128, 8, 32), 2), round(domains_of_a_token(128, 8, 4), 2)
    (7.36, 3.63)
    """
    if experts % domains or experts % groups:
        raise UsageError(
            f"{experts} experts do not lie evenly on {domains} ranks or nodes, or in {groups} "
            "groups"
        )
    # Experts from which those of a token are drawn, once its groups are.
    size = experts // groups
    total = open_groups * size
    if not 1 <= open_groups <= groups or top_k > total:
        raise UsageError(
            f"{top_k} experts of a token do not lie in {open_groups} of {groups} groups of {size}"
        )
    all_ways = math.comb(total, top_k) * math.comb(groups, open_groups)
    reached = 0.0
    for domain in range(domains):
        ways = _overlaps(domain * experts // domains, (domain + 1) * experts // domains, size)
        # Whole numbers, since the ways are many and their difference is small.
        missed = 0
        for (opened, own), count in ways.items():
            others = groups - _groups_in(domain, experts // domains, size)
            # The other open groups lie elsewhere, in any of the groups that do not overlap.
            rest = open_groups - opened
            if 0 <= rest <= others:
                missed += count * math.comb(others, rest) * math.comb(total - own, top_k)
        reached += 1.0 - missed / all_ways
    return reached


def _groups_in(domain: int, own: int, size: int) -> int:
    """The number of groups that a domain of `own` experts overlaps."""
    return ((domain + 1) * own - 1) // size - domain * own // size + 1


def _overlaps(start: int, end: int, size: int) -> Mapping[tuple[int, int], int]:
    """The ways to open some of the overlapped groups, by their number and the domain's experts."""
    ways = {(0, 0): 1}
    for group in range(start // size, (end - 1) // size + 1):
        own = min(end, (group + 1) * size) - max(start, group * size)
        # A group is closed, as before, or open, and then its experts here can be drawn.
        further: dict[tuple[int, int], int] = dict(ways)
        for (opened, experts), count in ways.items():
            place = (opened + 1, experts + own)
            further[place] = further.get(place, 0) + count
        ways = further
    return ways
