"""Layouts: their texts, which are valid, and the shards that they make."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.errors import RuleError, UsageError
from autopar.runtime.proof import shard
from autopar.sharding import Axis, B, Kind, Layout, Mesh, P, Placement, R, S, factorisations
from autopar.sharding.candidates import is_storable
from autopar.sharding.layout import (
    REDUCTIONS,
    format_layout,
    is_valid,
    local_parts,
    local_shape,
    parse_layout,
)
from tests.sharding.storing import storage_layouts

PLACEMENTS = st.one_of(
    st.just(R),
    st.just(B),
    st.builds(lambda r: Placement(Kind.PARTIAL, reduction=r), st.sampled_from(REDUCTIONS)),
    st.builds(S, st.integers(0, 12), st.integers(1, 40)),
)
SMALL = st.one_of(
    st.sampled_from([R, B, P]), st.builds(S, st.integers(0, 1), st.sampled_from([1, 2, 3, 4, 6]))
)


@given(layout=st.lists(PLACEMENTS, max_size=4).map(tuple))
def test_texts_round_trip(layout: Layout) -> None:
    assert parse_layout(format_layout(layout)) == layout


@pytest.mark.parametrize(
    "text", ["S", "S-1", "S0/0", "S0/", "X", "R,R", "P(", "P(product)", "s0", "S0S1", "S0.5"]
)
def test_texts_that_are_no_layout(text: str) -> None:
    with pytest.raises(RuleError, match="layout"):
        parse_layout(text)


@settings(max_examples=150, deadline=None)
@given(
    data=st.data(), mesh=st.sampled_from([(2,), (4,), (2, 2), (2, 3), (3, 2), (2, 2, 2), (1, 2)])
)
def test_shards_of_a_valid_layout_tile_the_tensor(
    data: st.DataObject, mesh: tuple[int, ...]
) -> None:
    """Every element lies in one shard (for every value of the other axes), and all shards have the
    local shape.
    """
    layout = tuple(data.draw(SMALL) for _ in mesh)
    shape = (data.draw(st.sampled_from([4, 12, 24])), data.draw(st.sampled_from([6, 8, 36])))
    assume(is_valid(layout, shape, mesh))
    whole = torch.arange(math.prod(shape)).reshape(shape)
    seen = torch.zeros(math.prod(shape), dtype=torch.int64)
    for coordinate in itertools.product(*map(range, mesh)):
        piece = shard(whole, layout, mesh, coordinate)
        assert piece.shape == local_shape(layout, shape, mesh)
        seen[piece.reshape(-1)] += 1
    assert (
        seen == math.prod(m for m, p in zip(mesh, layout, strict=True) if p.kind is not Kind.SPLIT)
    ).all()


@pytest.mark.parametrize(
    ("layout", "shape", "mesh", "valid"),
    [
        ("S0 S0", (8,), (2, 4), True),
        ("S0 S0", (4,), (2, 4), False),
        ("S0", (6,), (4,), False),
        ("S1", (6,), (2,), False),
        ("S0/3", (6,), (2,), True),
        ("S0/4", (6,), (2,), False),
        ("S0 S0/2", (8,), (2, 4), True),
        ("S0 S0/3", (12,), (2, 2), False),
        ("R", (6,), (2, 2), False),
        ("S0 S0/3", (12,), (1, 2), True),
        ("S0/2 S0/3", (12,), (2, 1), True),
    ],
)
def test_which_layouts_divide(
    layout: str, shape: tuple[int, ...], mesh: tuple[int, ...], valid: bool
) -> None:
    assert is_valid(parse_layout(layout), shape, mesh) is valid


def test_parts_that_are_left_to_an_inner_level() -> None:
    layout = parse_layout("S0 S0/4")
    assert [local_parts(layout, axis, (2, 2)) for axis in (0, 1)] == [1, 2]
    assert local_shape(layout, (16,), (2, 2)) == (4,)


def test_storage_is_what_a_dtensor_can_have() -> None:
    actual = storage_layouts((12, 6), (2, 2), {0: (1, 3)})
    assert len(set(actual)) == len(actual)
    assert (
        parse_layout("S0/3 R") in actual
        and parse_layout("S0 S0") in actual
        and parse_layout("S0/3 S1") in actual
    )
    assert all(
        is_valid(layout, (12, 6), (2, 2)) and is_storable(layout, (2, 2)) for layout in actual
    )
    assert parse_layout("S0/3 S0/3") not in actual and parse_layout("S0 S0/3") not in actual


def test_meshes() -> None:
    mesh = Mesh.of(node=2, gpu=3)
    assert (mesh.devices, str(mesh), mesh.index("gpu")) == (6, "node=2 x gpu=3", 1)
    assert [mesh.coordinate(rank) for rank in range(6)] == list(
        itertools.product(range(2), range(3))
    )
    for axis in range(2):
        groups = mesh.groups((axis,))
        assert sorted(itertools.chain(*groups)) == list(range(6))
        for group in groups:
            assert [mesh.coordinate(rank)[axis] for rank in group] == list(range(mesh.shape[axis]))
            assert (
                len(
                    {
                        tuple(c for a, c in enumerate(mesh.coordinate(rank)) if a != axis)
                        for rank in group
                    }
                )
                == 1
            )


@pytest.mark.parametrize("devices", [1, 2, 6, 7, 12, 64, 3072])
def test_factorisations(devices: int) -> None:
    actual = list(factorisations(devices))
    assert all(math.prod(sizes) == devices and len(sizes) <= 3 for sizes in actual)
    assert len(set(actual)) == len(actual) and (devices,) in actual
    assert devices == 1 or all(min(sizes) > 1 for sizes in actual)
    wanted = sum(1 for a in range(2, devices) if devices % a == 0)
    assert sum(len(sizes) == 2 for sizes in actual) == wanted


def test_meshes_that_are_refused() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Mesh.of(gpu=0)
    with pytest.raises(UsageError, match="distinct"):
        Mesh(axes=(Axis(name="a", size=2), Axis(name="a", size=2)))
    with pytest.raises(UsageError, match="no axis 'x'"):
        Mesh.of(gpu=2).index("x")
