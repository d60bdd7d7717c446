"""Cost graphs for the tests: small random ones of every shape, and layered ones whose tables are
shared.
"""

import math
import random
from dataclasses import replace

import numpy as np

from autopar.search import CostGraph


def random_graph(seed: int) -> CostGraph:
    """Up to seven variables of up to four choices; some with ties, forbidden entries, shared
    tables, settled or lone variables.
    """
    pick = random.Random(seed)
    draw = np.random.default_rng(seed)
    count = pick.randint(0, 7) if seed % 50 else 0
    sizes = [pick.choice((1, 2, 2, 3, 3, 4)) for _ in range(count)]
    ties = pick.random() < 0.5
    forbidden = pick.choice((0.0, 0.0, 0.1, 0.3))
    shared: dict[tuple[int, ...], np.ndarray] = {}

    def table(*shape: int) -> np.ndarray:
        fresh = draw.integers(0, 5, shape).astype(float) if ties else draw.random(shape) - 0.2
        fresh[draw.random(shape) < forbidden] = np.inf
        return shared.setdefault(shape, fresh) if pick.random() < 0.6 else fresh

    edges = {edge: table(sizes[edge[0]], sizes[edge[1]]) for edge in _topology(pick, count)}
    return CostGraph(
        sizes=tuple(sizes),
        unary=tuple(table(size) for size in sizes),
        edges=edges,
        memory=tuple(draw.integers(0, 9, size).astype(float) for size in sizes),
        digits=tuple(draw.integers(0, 3, (size, 2)) for size in sizes),
    )


def _topology(pick: random.Random, count: int) -> list[tuple[int, int]]:
    chain = [(i, i + 1) for i in range(count - 1)]
    shape = pick.choice(("chain", "tree", "cycle", "dense", "sparse"))
    if shape == "chain":
        return chain
    if shape == "tree":
        return [(pick.randrange(i), i) for i in range(1, count)]
    if shape == "cycle":
        return chain + ([(0, count - 1)] if count > 2 else [])
    density = 0.8 if shape == "dense" else 0.3
    return [(u, v) for v in range(count) for u in range(v) if pick.random() < density]


def random_family(seed: int) -> CostGraph:
    """A random graph of one of four families: small ones of every shape, equal layers, layers with
    a hub, several components.
    """
    pick = random.Random(f"family {seed}")
    family = seed % 4
    if family == 0:
        return random_graph(seed)
    if family == 3:
        return union(random_graph(seed), random_graph(seed + 1), most=10**5)
    layers, operators, size = pick.choice(((2, 3, 3), (2, 4, 3), (2, 3, 4), (4, 3, 2), (3, 3, 2)))
    graph = layered_graph(
        layers=layers,
        operators=operators,
        size=size,
        seed=seed,
        hub=pick.choice((2, 3)) if family == 2 else 0,
    )
    return forbid(graph, seed) if pick.random() < 0.5 else graph


def union(first: CostGraph, second: CostGraph, *, most: int) -> CostGraph:
    """Both graphs side by side.

    The first alone when there would be more than `most` assignments.
    """
    if math.prod(first.sizes) * math.prod(second.sizes) > most:
        return first
    moved = {
        (u + len(first.sizes), v + len(first.sizes)): table
        for (u, v), table in second.edges.items()
    }
    assert first.memory is not None and second.memory is not None
    return CostGraph(
        sizes=first.sizes + second.sizes,
        unary=first.unary + second.unary,
        edges={**first.edges, **moved},
        memory=first.memory + second.memory,
    )


def forbid(graph: CostGraph, seed: int) -> CostGraph:
    """The graph with some entries of its (shared) tables forbidden, and the costs rounded so that
    many tie.
    """
    draw = np.random.default_rng(seed)
    made: dict[int, np.ndarray] = {}
    for table in (*graph.unary, *graph.edges.values()):
        if id(table) not in made:
            made[id(table)] = np.where(draw.random(table.shape) < 0.15, np.inf, np.round(3 * table))
    edges = {edge: made[id(table)] for edge, table in graph.edges.items()}
    return replace(graph, unary=tuple(made[id(table)] for table in graph.unary), edges=edges)


def layered_graph(
    *, layers: int, operators: int, size: int, seed: int = 0, hub: int = 0
) -> CostGraph:
    """A chain of equal layers with a residual edge in each, and (`hub` > 0) one variable of that
    size tied to every layer.
    """
    draw = np.random.default_rng(seed)
    count = layers * operators
    links = [draw.random((size, size)) for _ in range(operators)]
    residual = draw.random((size, size))
    tie = draw.random((size, max(hub, 1)))
    costs = [draw.random(size) for _ in range(operators)]
    bytes_ = [draw.integers(1, 100, size).astype(float) for _ in range(operators)]
    edges = {(i, i + 1): links[i % operators] for i in range(count - 1)}
    edges.update({(i * operators, i * operators + 2): residual for i in range(layers)})
    unary = [costs[i % operators] for i in range(count)]
    memory = [bytes_[i % operators] for i in range(count)]
    sizes = [size] * count
    if hub:
        edges.update({(i * operators, count): tie for i in range(layers)})
        unary.append(draw.random(hub))
        memory.append(draw.integers(1, 100, hub).astype(float))
        sizes.append(hub)
    return CostGraph(sizes=tuple(sizes), unary=tuple(unary), edges=edges, memory=tuple(memory))


def clique(*, count: int, size: int, seed: int, forbidden: float = 0.0) -> CostGraph:
    """Every pair of variables has a random table."""
    draw = np.random.default_rng(seed)
    pairs = {(u, v): draw.random((size, size)) for v in range(count) for u in range(v)}
    for table in pairs.values():
        table[draw.random(table.shape) < forbidden] = np.inf
    return CostGraph(
        sizes=(size,) * count,
        unary=tuple(draw.random(size) for _ in range(count)),
        edges=pairs,
        memory=tuple(draw.integers(1, 9, size).astype(float) for _ in range(count)),
    )
