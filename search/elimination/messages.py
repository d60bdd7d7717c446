"""Messages along the edges: what each choice costs, with the best that its surroundings make of it.

    total_v[x]     = unary_v[x] + sum over neighbours u of m_uv[x]
    m_vu[y]       <- min over x of  share_v * total_v[x] - m_uv[x] + edge[x, y]

Variables are gone through in their order, forth and back. The shares are such that all totals
together never exceed the optimum (V. Kolmogorov, Convergent Tree-Reweighted Message Passing, IEEE
PAMI 28, 2006). A round takes time linear in the entries. Trees that hang on the rest, such as
parameters, are folded into it at first, which is exact, and get their messages at last.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.compiled import minimise

from ..costgraph import Edge
from ..tables import Table

Turned = dict[int, Table]
"""The edges of a variable by the neighbour, its own choices on the first axis."""


def totals(unary: Sequence[Table], edges: Mapping[Edge, Table], rounds: int) -> list[Table]:
    """Return the total of each choice of each variable; the tables are finite."""
    around: list[Turned] = [{} for _ in unary]
    # Both directions lie in one piece, as the loop over the entries reads them row by row.
    for (u, v), table in edges.items():
        around[u][v] = table
        around[v][u] = np.ascontiguousarray(table.T)
    own = list(unary)
    hanging = _fold(own, around)
    _pass(own, around, rounds)
    for v, u, table, message in reversed(hanging):
        own[v] = own[v] + _sent(own[u] - message, np.ascontiguousarray(table.T))
    return own


def _fold(own: list[Table], around: list[Turned]) -> list[tuple[int, int, Table, Table]]:
    """Add each hanging variable's message to its neighbour's own costs, and take it out.

    Returns the variables in this order, with the neighbour, the edge and the message.
    """
    hanging = []
    leaves = [v for v, edges in enumerate(around) if len(edges) == 1]
    for leaf in leaves:
        # What is left of a tree hangs on by one edge less each time, until a cycle is reached.
        v = leaf
        while len(around[v]) == 1:
            u, table = around[v].popitem()
            del around[u][v]
            message = _sent(own[v], table)
            own[u] = own[u] + message
            hanging.append((v, u, table, message))
            v = u
    return hanging


def _pass(own: list[Table], around: list[Turned], rounds: int) -> None:
    """Turn the variables' own costs into their totals."""
    count = len(own)
    behind = [[(u, table) for u, table in around[v].items() if u > v] for v in range(count)]
    before = [[(u, table) for u, table in around[v].items() if u < v] for v in range(count)]
    # A variable's costs are shared out to the chains that go through it.
    shares = [1.0 / max(len(one), len(other), 1) for one, other in zip(before, behind, strict=True)]
    # Totals are kept up to date by the difference to the message before, not added up anew.
    messages: dict[Edge, Table] = {}
    for _ in range(rounds):
        for onward in (behind, before):
            for v in range(count) if onward is behind else reversed(range(count)):
                if onward[v]:
                    share = shares[v] * own[v]
                for u, table in onward[v]:
                    given = share - messages[u, v] if (u, v) in messages else share
                    new = _sent(given, table)
                    old = messages.get((v, u))
                    own[u] = own[u] + (new if old is None else new - old)
                    messages[v, u] = new


def _sent(costs: Table, table: Table) -> Table:
    """The least cost for each choice on the other side of an edge."""
    message = np.empty(table.shape[1])
    minimise(message, (table, costs.reshape(-1, 1)))
    return message
