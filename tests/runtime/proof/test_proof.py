"""A short proof of what ranks run in the place of an operator: some samples on one mesh.
`tests/sharding` has all of them on all meshes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from autopar.runtime.operators.registry import form_of
from autopar.runtime.proof import Sample, prove
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
