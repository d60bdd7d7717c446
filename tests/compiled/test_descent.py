"""The compiled descent equals that of numpy, and refuses what it cannot read."""

from array import array
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import compiled
from autopar.compiled import descent
from autopar.search import CostGraph
from autopar.search.elimination.local_search import Descent

Table = NDArray[np.float64]

needs_compiled = pytest.mark.skipif(
    compiled.descend is descent.descend, reason="the package was installed without a compiler"
)


def drawn(seed: int) -> CostGraph:
    """A graph of a few variables, some without a choice; tables with forbidden pairs, shared ones,
    and ones that do not lie in one piece.
    """
    draw = np.random.default_rng(seed)
    sizes = tuple(int(draw.choice([1, 2, 3, 9, 40])) for _ in range(12))

    def table(*shape: int) -> Table:
        made = draw.random(shape)
        made[draw.random(shape) < 0.1] = np.inf
        return np.asfortranarray(made) if draw.random() < 0.3 else made

    edges: dict[tuple[int, int], Table] = {}
    for u in range(11):
        for v in range(u + 1, 12):
            if draw.random() < 0.4:
                alike = [known for known in edges.values() if known.shape == (sizes[u], sizes[v])]
                edges[u, v] = alike[0] if alike else table(sizes[u], sizes[v])
    memory = tuple(draw.random(size) for size in sizes) if draw.random() < 0.7 else None
    unary = tuple(table(2 * size)[::2] for size in sizes)
    return CostGraph(derived=True, sizes=sizes, unary=unary, edges=edges, memory=memory)


@needs_compiled
@pytest.mark.parametrize("seed", range(120))
def test_compiled_descent_equals_numpy_bit_for_bit(seed: int) -> None:
    graph = drawn(seed)
    draw = np.random.default_rng(seed)
    start = [int(draw.integers(size)) for size in graph.sizes]
    laid = Descent(graph)
    for price, room, sweeps in ((0.0, np.inf, 4), (0.3, 0.2, 4), (0.1, -1.0, 1)):
        ends = []
        for form in (descent, compiled):
            choices = np.array(start, dtype=np.int64)
            form.descend(laid.tables, laid.program, choices, price, room, sweeps)
            ends.append(choices.tolist())
        assert ends[0] == ends[1]


@needs_compiled
@pytest.mark.parametrize(
    ("program", "start", "said"),
    [
        ([0, 0, -1], [0, 0], "record"),
        ([0, 0, -1, 1, 1], [0, 0], "record"),
        ([2, 0, -1, 0], [0, 0], "record"),
        ([0, 2, -1, 0], [0, 0], "record"),
        ([0, 1, -1, 0], [0, 0], "record"),
        ([0, 0, 2, 0], [0, 0], "record"),
        ([0, 0, -1, 1, 1, 1, 1], [0, 0], "record"),
        ([0, 0, -1, 1, 1, 1, 2], [0, 0], "record"),
        ([0, 0, -1, 1, 2, 1, 0], [0, 0], "record"),
        ([0, 0, -1, 0], [2, 0], "record"),
        ([0, 0, -1, 1, 1, 1, 0], [0, 3], "no such choice"),
        ([0, 0, -1, 1, 1, 1, 0], [0, -1], "no such choice"),
    ],
)
def test_broken_programs_are_refused(program: list[int], start: list[int], said: str) -> None:
    """Variable 0 has 2 choices, its neighbour 3."""
    tables = [np.zeros(2), np.zeros((2, 3))]
    with pytest.raises(ValueError, match=said):
        compiled.descend(tables, array("q", program), np.array(start), 0.0, np.inf, 4)


@needs_compiled
def test_choices_are_written_in_place() -> None:
    floats: Any = np.zeros(2)
    with pytest.raises(ValueError, match="int64"):
        compiled.descend([], array("q"), floats, 0.0, np.inf, 4)
