"""Certificates: what proves a solution's bound, written down so that it is checked without a
search.

The messages of an elimination. Let factors be the unary tables (plus the price of their bytes) and
the edges; to eliminate v, the factors that contain v give way to a message over their other
variables. Where

    m_v[x_N(v)]  <=  min over x_v of  sum of the factors that contain v

for every v, the sum of the last constants, less price * limit, is a lower bound of every cost
within the limit. So the checker looks at each clique of the elimination once, and at equal ones
(equal tables, equal message) once in all: its work is linear in the entries of the distinct
cliques. What a message exceeds the minimum by is taken off the bound, for each variable that uses
it. Before the elimination, dropped choices: c of v may give way to d where, N the neighbours,

    unary[c] - unary[d] + sum over u in N of  min over x_u of (edge[c, x_u] - edge[d, x_u])  >=  0
    memory[d]  <=  memory[c]

and split variables: v gets a copy for each of its edges, its unary table in equal shares. Both
leave the bound a bound of the graph. Source: R. Dechter, Bucket elimination, Artificial
Intelligence 113 (1999); M. Schlesinger (1976) for reparametrisations.
"""

import math
from dataclasses import dataclass

from verification import Factors, Malformed

from autopar.search.costgraph import CostGraph
from autopar.search.tables import Indices, Table

KINDS = ("messages", "messages+price", "minima", "enumeration")
ROUNDING = 1e-9
"""Relative distance of two figures that are equal but for rounding."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Certificate:
    """A solution's figures and what proves its bound.

    `order` eliminates the variables, and the copies that splitting numbered after them, one by one;
    `numbers` are their messages, whose axes are the remaining neighbours in ascending order.
    `substitutes[v]` names for each choice of v itself, what replaces it, or -1 (forbidden).
    """

    kind: str
    choices: tuple[int, ...]
    cost: float
    bound: float
    limit: float | None = None
    price: float = 0.0
    substitutes: tuple[Indices | None, ...] = ()
    split: tuple[int, ...] = ()
    order: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()
    messages: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of a check: `bound` is what the certificate proves, `cost` what the choices cost;
    `reason` says why it is not valid.

    A certificate of the kind "enumeration" is valid when its figures are right, though its messages
    prove less than its search did.
    """

    valid: bool
    bound: float
    cost: float
    reason: str = ""


def check(graph: CostGraph, certificate: Certificate) -> Verdict:
    """Whether the choices cost what they are said to, within the limit, and whether the bound is
    one.
    """
    try:
        cost = graph.cost(certificate.choices)
        memory = graph.memory_of(certificate.choices)
        bound = _proven(graph, certificate)
    except Malformed as error:
        return Verdict(valid=False, bound=-math.inf, cost=math.inf, reason=str(error))
    except ValueError as error:
        return Verdict(
            valid=False,
            bound=-math.inf,
            cost=math.inf,
            reason=f"the choices are not of this graph: {error}",
        )
    near = ROUNDING * abs(cost)
    reason = ""
    if not abs(cost - certificate.cost) <= near:
        reason = f"the choices cost {cost!r}, not {certificate.cost!r}"
    elif certificate.limit is not None and memory > certificate.limit:
        reason = f"the choices need {memory!r} bytes, more than {certificate.limit!r}"
    elif certificate.bound > cost + near:
        reason = f"the bound {certificate.bound!r} is above the cost {cost!r}"
    elif certificate.kind != "enumeration" and not certificate.bound <= bound + near:
        reason = f"only {bound!r} of the bound {certificate.bound!r} is proven"
    return Verdict(valid=not reason, bound=bound, cost=cost, reason=reason)


def _proven(graph: CostGraph, certificate: Certificate) -> float:
    if certificate.kind not in KINDS:
        raise Malformed(
            f"unknown kind of certificate {certificate.kind!r}; valid kinds: {', '.join(KINDS)}"
        )
    if not certificate.order:
        return math.fsum(float(table.min()) for table in (*graph.unary, *graph.edges.values()))
    if not 0.0 <= certificate.price < math.inf or (certificate.price and certificate.limit is None):
        raise Malformed(f"a price of {certificate.price} asks for a limit")
    if certificate.limit is not None and graph.memory is None:
        raise Malformed("a limit asks for tables of memory")
    substitutes = certificate.substitutes or (None,) * len(graph.sizes)
    if len(substitutes) != len(graph.sizes):
        raise Malformed(f"substitutes of {len(substitutes)} variables for {len(graph.sizes)}")
    factors = Factors(
        graph,
        graph.memory if certificate.limit is not None else None,
        certificate.price,
        substitutes,
    )
    factors.split(certificate.split)
    bound = factors.bound(certificate.order, certificate.numbers, certificate.messages)
    return bound - (
        certificate.price * certificate.limit
        if certificate.price and certificate.limit is not None
        else 0.0
    )
