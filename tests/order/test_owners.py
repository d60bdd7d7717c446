"""Owners of whole matrices: how evenly they share the work, and what they send."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from autopar.ir import Role, Tensor
from autopar.order.owners import ITEMSIZE, Owners, multiply_adds, owners_of
from autopar.sharding.layout import parse_layout
from autopar.sharding.mesh import Mesh


def _matrix(name: str, *shape: int) -> Tensor:
    return Tensor(name=name, shape=shape, dtype="float32", role=Role.PARAMETER, trainable=True)


def _owners(mesh: Mesh, layout: str, *shapes: tuple[int, ...]) -> Owners:
    matrices = [_matrix(f"w{number}", *shape) for number, shape in enumerate(shapes)]
    return owners_of(mesh, matrices, {one.name: parse_layout(layout) for one in matrices})


def _work(owners: Owners) -> list[int]:
    return [sum(n * multiply_adds(*shape) for shape, n in load.items()) for load in owners.loads]


@pytest.mark.parametrize("seed", range(20))
def test_the_slowest_rank_is_within_four_thirds_of_the_optimum(seed: int) -> None:
    """Against every placement of a few matrices."""
    rng = random.Random(seed)
    ranks = rng.choice([2, 3])
    shapes = [(rng.choice([4, 8, 12]), rng.choice([8, 16, 40])) for _ in range(6)]
    owners = _owners(Mesh.of(a=ranks), "R", *shapes)
    best = min(
        max(
            sum(
                multiply_adds(*shape)
                for shape, at in zip(shapes, placed, strict=True)
                if at == rank
            )
            for rank in range(ranks)
        )
        for placed in itertools.product(range(ranks), repeat=len(shapes))
    )
    assert best <= max(_work(owners)) <= (4 / 3 - 1 / (3 * ranks)) * best
    assert max(_work(owners)) / best <= owners.imbalance + 1e-12


def test_equal_layers_are_dealt_evenly() -> None:
    owners = _owners(Mesh.of(a=4), "S0", *[(8, 8), (8, 32)] * 8)
    assert set(_work(owners)) == {sum(_work(owners)) // 4}
    assert owners.imbalance == 1.0
    assert owners == _owners(Mesh.of(a=4), "S0", *[(8, 8), (8, 32)] * 8)


def test_experts_that_are_split_are_whole_where_they_are() -> None:
    """Each rank of the expert axis owns its experts; the other axis shares them."""
    mesh = Mesh.of(expert=2, data=2)
    owners = _owners(mesh, "S0 R", (8, 4, 6))
    assert owners.loads == (Counter({(4, 6): 2}),) * 4
    assert not owners.gathers()
    (back,) = owners.returns()
    # Of 4 experts on each rank two are updated by each copy.
    assert (back.kind, back.axes, back.nbytes) == ("all_gather", (1,), ITEMSIZE * 4 * 4 * 6)
    alone = _owners(Mesh.of(expert=4), "S0", (8, 4, 6))
    assert not alone.gathers() and not alone.returns()


def test_messages_of_shards_and_copies() -> None:
    """Two equal matrices on 2 x 2 ranks: one owner in each copy."""
    owners = _owners(Mesh.of(a=2, b=2), "S1 R", (4, 6), (4, 6))
    issued = (*owners.gathers(), *owners.returns())
    nbytes = ITEMSIZE * 4 * 6
    assert [(c.kind, c.axes, c.nbytes) for c in issued] == [
        ("all_to_all", (0,), nbytes),
        ("all_to_all", (0,), nbytes),
        ("all_gather", (1,), nbytes),
    ]
    assert {c.phase for c in issued} == {"update"}


def test_one_device_owns_everything() -> None:
    owners = _owners(Mesh(axes=()), "", (4, 6), (2, 3, 5))
    assert owners.loads == (Counter({(4, 6): 1, (3, 5): 2}),)
    assert not owners.gathers() and not owners.returns()
