"""A short proof of what ranks run in the place of an operator: some samples on one mesh.
`tests/sharding` has all of them on all meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest
import torch
from torch._C._distributed_c10d import _unregister_all_process_groups
from torch.distributed import _functional_collectives as funcol

from autopar.runtime.operators.registry import form_of
from autopar.runtime.proof import Sample, prove
from autopar.runtime.proof.thread_ranks import axis_groups, in_threads
from tests.sharding import (
    samples,
    samples_communicating,
    samples_halo,
    samples_of_layers,
    samples_of_moves,
    samples_of_numbers,
)

FAMILIES = (
    *(m.FAMILIES for m in (samples, samples_of_layers, samples_of_moves, samples_of_numbers)),
)
COMMUNICATING = {**samples_communicating.FAMILIES, **samples_halo.FAMILIES}


def _with_a_form() -> Iterator[Sample]:
    """Calls whose sizes or arguments are others on a shard."""
    for families in FAMILIES:
        for family in families.values():
            yield from (case for case in family() if form_of(case.kind) != form_of(""))


PROVEN: Mapping[str, Callable[[], Iterator[Sample]]] = {
    "local forms": _with_a_form,
    **COMMUNICATING,
}


@pytest.mark.parametrize("name", PROVEN)
def test_shards_equal_the_whole(name: str) -> None:
    proven = [prove(case, (2,)) for case in list(PROVEN[name]())[::3]]
    assert proven and all(proven)


def test_groups_of_threads_outlive_the_default_group() -> None:
    """`destroy_process_group` empties torch's registry of names, in which these groups are, too."""

    def summed(rank: int) -> list[float]:
        group = groups[rank][(0,)]
        return funcol.wait_tensor(
            torch.ops._c10d_functional.all_reduce(torch.ones(1), "sum", group.name)
        ).tolist()

    for _ in range(2):
        groups = axis_groups((2,))
        assert in_threads(2, summed) == [[2.0], [2.0]]
        _unregister_all_process_groups()
