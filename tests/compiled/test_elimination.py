"""The compiled elimination equals that of numpy, and refuses what it cannot read."""

from array import array

import numpy as np
import pytest
from numpy.typing import NDArray

from autopar import compiled
from autopar.compiled import elimination
from autopar.search.elimination.join import merging

Table = NDArray[np.float64]

needs_compiled = pytest.mark.skipif(
    compiled.eliminate is elimination.eliminate,
    reason="the package was installed without a compiler",
)


def drawn(seed: int) -> tuple[list[Table], list[int], list[int], list[int]]:
    """Leaves, and the program of two joins with the steps back, over 5 variables of random sizes.

    The first join eliminates variable 0; the second one variable 1, from the first one's table.
    """
    draw = np.random.default_rng(seed)
    sizes = [int(draw.choice([1, 2, 3, 9, 40])) for _ in range(5)]
    leaves: list[Table] = []

    def taken(labels: tuple[int, ...], variables: list[int]) -> tuple[tuple[int, ...], int]:
        table = draw.random([sizes[variables[label]] for label in labels])
        table[draw.random(table.shape) < 0.1] = np.inf
        if draw.random() < 0.3:
            table = np.asfortranarray(table)
        if draw.random() < 0.2:
            table = np.broadcast_to(table[:1], table.shape)
        leaves.append(table)
        return labels, len(leaves) - 1

    def labels(count: int) -> list[tuple[int, ...]]:
        every = [(0,), (0, 1), (1, 0), (2, 0), (0, 3), (2, 0, 1)]
        return [axes for axes in every if max(axes) < count and draw.random() < 0.7]

    first = [taken(axes, [0, 1, 2, 3]) for axes in [*labels(4), (0, 1), (0, 2), (3, 0)]]
    second = [taken(axes, [1, 2, 3, 4]) for axes in [*labels(4), (0, 3)]]
    second.append(((0, 1, 2), len(leaves)))
    program = elimination.recorded(
        sizes[0], sizes[1:4], first, merging(tuple([axes for axes, _ in first]))
    ) + elimination.recorded(
        sizes[1], sizes[2:], second, merging(tuple([axes for axes, _ in second]))
    )
    return leaves, program, [1, 1, 2, 3, 4, 0, 0, 1, 2, 3], sizes


@needs_compiled
@pytest.mark.parametrize("seed", range(60))
def test_compiled_elimination_equals_numpy_bit_for_bit(seed: int) -> None:
    leaves, program, steps, sizes = drawn(seed)
    results = []
    for form in (elimination, compiled):
        tables = [*leaves, np.full(sizes[1:4], np.nan), np.full(sizes[2:], np.nan)]
        form.eliminate(tables, array("q", program), len(leaves), b"\1\1")
        choices = np.array([0, 0, *(size - 1 for size in sizes[2:])])
        form.assign(tables, array("q", program), len(leaves), array("q", steps), choices)
        results.append((tables[-2].tobytes(), tables[-1].tobytes(), choices.tolist()))
    assert results[0] == results[1]


@needs_compiled
def test_joins_that_are_not_wanted_stay_as_they_are() -> None:
    leaves, program, _, sizes = drawn(1)
    tables = [*leaves, np.full(sizes[1:4], 7.0), np.full(sizes[2:], np.nan)]
    compiled.eliminate(tables, array("q", program), len(leaves), b"\0\1")
    assert (tables[-2] == 7.0).all() and not np.isnan(tables[-1]).any()


@needs_compiled
@pytest.mark.parametrize(
    ("record", "out", "said"),
    [
        ([9, 2, 1, 3, 1, 0, 2, 0, 1], np.empty(3), "cut off"),
        ([11, 2, 1, 3, 1, 0, 2, 0, 2, 0, -1], np.empty(3), "label"),
        ([11, 2, 1, 3, 1, 0, 2, 1, 1, 0, -1], np.empty(3), "label 0"),
        ([11, 2, 1, 3, 1, 0, 2, 0, 1, 0, 0], np.empty(3), "no term"),
        ([11, 2, 1, 3, 1, 4, 2, 0, 1, 0, -1], np.empty(3), "not there"),
        ([11, 2, 1, 4, 1, 0, 2, 0, 1, 0, -1], np.empty(4), "do not fit"),
        ([11, 2, 1, 3, 1, 0, 2, 0, 1, 0, -1], np.empty(4), "do not fit"),
        ([11, 2, 1, 3, 0, 0, 2, 0, 1, 0, -1], np.empty(3), "terms"),
    ],
)
def test_broken_programs_are_refused(record: list[int], out: Table, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        compiled.eliminate([np.zeros((2, 3)), out], array("q", record), 1, b"\1")


@needs_compiled
@pytest.mark.parametrize(
    ("steps", "said"),
    [([0, 0], "cut off"), ([0, 1, 1], "cut off"), ([0, 0, 5], "no such"), ([0, 0, 1], "no such")],
)
def test_broken_steps_are_refused(steps: list[int], said: str) -> None:
    record = array("q", [11, 2, 1, 3, 1, 0, 2, 0, 1, 0, -1])
    tables = [np.zeros((2, 3)), np.zeros(3)]
    with pytest.raises(ValueError, match=said):
        compiled.assign(tables, record, 1, array("q", steps), np.array([0, 3]))
