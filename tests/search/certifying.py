"""Writes down the certificate of a solution: its elimination once more, all messages kept."""

from certificate import Certificate

from autopar.search.costgraph import CostGraph, Solution
from autopar.search.elimination.conditioning import Minimiser
from autopar.search.elimination.pruning import reduce


def certify(graph: CostGraph, solution: Solution) -> Certificate:
    """Write down the proof of `found`, by one more elimination at its price; not part of the
    search.
    """
    proof = solution.proof
    plain = Certificate(
        kind=proof.kind,
        choices=solution.choices,
        cost=solution.cost,
        bound=solution.lower_bound,
        limit=proof.limit,
    )
    if not proof.max_entries:
        return plain
    small = reduce(graph, prune=proof.pruned, memory=proof.limit is not None)
    solver = Minimiser(small.graph, max_entries=proof.max_entries)
    tables = solver.plan.evaluate(proof.price)
    steps = solver.plan.steps
    return Certificate(
        kind=proof.kind,
        choices=solution.choices,
        cost=solution.cost,
        bound=solution.lower_bound,
        limit=proof.limit,
        price=proof.price,
        substitutes=small.substitutes,
        split=solver.fixed,
        order=tuple(step.variable for step in steps),
        numbers=tuple(step.join for step in steps),
        messages=tuple(tables[len(solver.plan.costs) :]),
    )
