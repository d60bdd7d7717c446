"""The same graph has the same solution, ten times over and in fresh processes with other hash
seeds.
"""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

from search_graphs import clique, layered_graph, random_family

from autopar.search import CostGraph, Infeasible, NoAssignment, solve
from autopar.search.elimination.orders import order

ROOT = Path(__file__).resolve().parents[2]


def outcome(graph: CostGraph, method: str, limit: float | None) -> str:
    try:
        solution = solve(graph, method=method, memory_limit=limit)
    except (Infeasible, NoAssignment) as error:
        return repr(error)
    return repr((solution, solution.proof))


def digest() -> str:
    """A digest of the solutions of many graphs by the methods that are no oracles."""
    graphs = [
        *map(random_family, range(40)),
        layered_graph(layers=12, operators=5, size=6, hub=4),
        clique(count=9, size=4, seed=2),
    ]
    results = []
    for graph in graphs:
        for method in ("dynamic_programming", "recursive_programming"):
            results += [outcome(graph, method, None), outcome(graph, method, 30.0)]
    return hashlib.sha256("\n".join(results).encode()).hexdigest()


def test_ten_runs() -> None:
    graph = layered_graph(layers=8, operators=5, size=6, hub=4)
    outcomes = set()
    for run in range(10):
        if run % 2:
            order.cache_clear()
        outcomes.add(outcome(graph, "dynamic_programming", 0.8 * solve(graph).memory))
    assert len(outcomes) == 1


def test_fresh_processes_with_other_hash_seeds() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_determinism; "
        "print(test_determinism.digest())"
    )
    printed = set()
    for seed in ("0", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            env=environment,
            cwd=ROOT,
            check=True,
        )
        printed.add(run.stdout.strip())
    assert printed == {digest()}
