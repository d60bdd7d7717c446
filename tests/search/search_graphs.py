"""Cost graphs for the tests: small random ones of every shape, and layered ones whose tables are shared."""

import random

import numpy as np

from autopar.search import CostGraph


def random_graph(seed: int) -> CostGraph:
    """Up to seven variables of up to four choices; some with ties, forbidden entries, shared tables, settled or lone variables."""
    pick, draw = random.Random(seed), np.random.default_rng(seed)
    count = pick.randint(0, 7) if seed % 50 else 0
    sizes = [pick.choice((1, 2, 2, 3, 3, 4)) for _ in range(count)]
    ties, forbidden = pick.random() < 0.5, pick.choice((0.0, 0.0, 0.1, 0.3))
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


def layered_graph(*, layers: int, operators: int, size: int, seed: int = 0, hub: int = 0) -> CostGraph:
    """A chain of equal layers with a residual edge in each, and (`hub` > 0) one variable of that size tied to every layer."""
    draw = np.random.default_rng(seed)
    count = layers * operators
    links = [draw.random((size, size)) for _ in range(operators)]
    residual, tie = draw.random((size, size)), draw.random((size, max(hub, 1)))
    costs = [draw.random(size) for _ in range(operators)]
    bytes_ = [draw.integers(1, 100, size).astype(float) for _ in range(operators)]
    edges = {(i, i + 1): links[i % operators] for i in range(count - 1)}
    edges.update({(i * operators, i * operators + 2): residual for i in range(layers)})
    unary, memory, sizes = [costs[i % operators] for i in range(count)], [bytes_[i % operators] for i in range(count)], [size] * count
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
