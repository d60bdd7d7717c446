"""Variables with equal surroundings make one class, and the classes' links are all edges."""

import numpy as np

from autopar.search import CostGraph
from autopar.search.elimination.alike import classes


def chain(count: int) -> CostGraph:
    """Equal variables in a row, joined by one table that is not symmetric."""
    table = np.arange(4.0).reshape(2, 2)
    return CostGraph(
        sizes=(2,) * count,
        unary=(np.array([0.0, 1.0]),) * count,
        edges={(v, v + 1): table for v in range(count - 1)},
    )


def test_the_inner_variables_of_a_chain_are_alike_and_its_ends_are_not() -> None:
    some = classes(chain(6), [0] * 6)
    assert some.of.tolist() == [0, 1, 1, 1, 1, 2]
    assert some.counts.tolist() == [1, 4, 1] and some.members.tolist() == [0, 1, 5]
    links = {(link.first, link.second): link.count for link in some.links}
    assert links == {(0, 1): 1, (1, 1): 3, (1, 2): 1}


def test_variables_of_different_numbers_are_not_alike() -> None:
    assert classes(chain(6), [0, 0, 1, 0, 0, 0]).of.tolist() == [0, 1, 2, 3, 4, 5]
    assert classes(chain(6), [0] * 6, merge=False).of.tolist() == list(range(6))


def test_a_later_class_first_turns_the_table() -> None:
    table = np.array([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]])
    graph = CostGraph(
        sizes=(3, 2, 3),
        unary=(np.zeros(3), np.zeros(2), np.zeros(3)),
        edges={(0, 1): table.T.copy(), (1, 2): table},
    )
    some = classes(graph, [0, 0, 0])
    cost = sum(
        link.count * link.table[1, 1 if link.second == 1 else 2]
        for link in some.links
        if (link.first, link.second) in {(0, 1), (1, 2)}
    )
    assert len(some.counts) == 3 and cost == table[1, 1] + table[1, 2]


def test_a_hundred_thousand_variables_have_three_classes() -> None:
    assert len(classes(chain(100_000), [0] * 100_000).counts) == 3
