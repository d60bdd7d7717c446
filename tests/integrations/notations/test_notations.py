"""Layouts in other systems' words and back: round trips over every layout of small meshes, fixed
texts, and what is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import random

import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from autopar.errors import AutoparError, RuleError, UsageError
from autopar.integrations.notations import NOTATIONS, read_layout, write_layout
from autopar.integrations.notations.mindspore import tensor_layout
from autopar.integrations.notations.place import Place
from autopar.runtime.parameters.torch_layouts import layout_of, placements_of
from autopar.sharding.layout import B, Kind, Layout, P, R, S, format_layout, parse_layout
from autopar.sharding.mesh import Mesh
from autopar.sharding.redistribution import without_gradient

MESHES = (Mesh.of(x=2), Mesh.of(x=2, y=4), Mesh.of(x=2, y=2, z=3))
RANK = 3


def _layouts(mesh: Mesh, says: frozenset[str]) -> list[Layout]:
    kinds = [
        R,
        B,
        *(S(dim) for dim in range(RANK)),
        *([P] if "P" in says else []),
        *([S(1, 3)] if "parts" in says else []),
    ]
    return list(itertools.product(kinds, repeat=len(mesh.axes)))


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("notation", NOTATIONS)
def test_what_is_written_is_read_back(notation: str, mesh: Mesh) -> None:
    says = NOTATIONS[notation].says
    for layout in _layouts(mesh, says):
        text = write_layout(notation, layout, mesh, RANK)
        assert read_layout(notation, text, mesh, RANK) == (
            layout if "B" in says else without_gradient(layout)
        ), text


@pytest.mark.parametrize(
    ("notation", "layout", "text"),
    [
        ("autopar", "S0 B", "S0 B"),
        ("dtensor", "S0 P", "(Shard(dim=0), Partial(sum))"),
        ("dtensor", "S1/3 R", "(_StridedShard(dim=1, sf=3), Replicate())"),
        ("oneflow", "S0 P", "(oneflow.sbp.split(dim=0), oneflow.sbp.partial_sum)"),
        ("mindspore", "S0 S1", "device_matrix=(2, 4) tensor_map=(1, 0, -1)"),
        ("mindspore", "S1 S1", "device_matrix=(2, 4) tensor_map=(-1, (1, 0), -1)"),
        ("shardy", "S1 P", '<@mesh, [{}, {"x"}, {}], unreduced={"y"}>'),
        ("shardy", "S0 S0", '<@mesh, [{"x", "y"}, {}, {}]>'),
        ("jax", "S2 S0", "PartitionSpec('y', None, 'x')"),
        ("gspmd", "S0 R", "{devices=[2,1,1,4]<=[2,4] last_tile_dim_replicate}"),
        ("gspmd", "S1 S0", "{devices=[4,2,1]<=[2,4]T(1,0)}"),
        ("gspmd", "R B", "{replicated}"),
    ],
)
def test_texts_are_those_of_the_systems(notation: str, layout: str, text: str) -> None:
    mesh = Mesh.of(x=2, y=4)
    assert write_layout(notation, parse_layout(layout), mesh, RANK) == text
    assert without_gradient(read_layout(notation, text, mesh, RANK)) == without_gradient(
        parse_layout(layout)
    )


@pytest.mark.parametrize(
    ("notation", "text", "layout"),
    [
        ("oneflow", "[S(0), B]", "S0 R"),
        ("oneflow", "(flow.sbp.split(0), flow.sbp.partial_sum)", "S0 P"),
        ("jax", "P(('x', 'y'))", "S0 S0"),
        ("jax", "PartitionSpec()", "R R"),
        ("gspmd", "{devices=[8,1,1]<=[8]}", "S0 S0"),
        ("gspmd", "{devices=[4,1,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}", "R S0"),
        ("shardy", '#sdy.sharding<@mesh, [{"y"}], replicated={"x"}>', "R S0"),
        ("dtensor", "Shard(0), Replicate()", "S0 R"),
    ],
)
def test_other_spellings_are_read(notation: str, text: str, layout: str) -> None:
    assert format_layout(read_layout(notation, text, Mesh.of(x=2, y=4), RANK)) == layout


@pytest.mark.parametrize(
    ("notation", "layout", "nearest"),
    [
        ("mindspore", "P R", "after its sum"),
        ("gspmd", "P R", "unreduced"),
        ("jax", "R P", "unreduced"),
        ("oneflow", "S1/3 R", "_StridedShard"),
        ("mindspore", "R S1/3", "the nearest is S1"),
        ("shardy", "P(max) R", "after the max"),
        ("oneflow", "P(min) R", "after the min"),
        ("jax", "S5 R", "dim 5"),
    ],
)
def test_what_cannot_be_said_is_refused_with_the_nearest(
    notation: str, layout: str, nearest: str
) -> None:
    with pytest.raises(RuleError, match=nearest):
        write_layout(notation, parse_layout(layout), Mesh.of(x=2, y=4), RANK)


@pytest.mark.parametrize(
    ("notation", "text", "why"),
    [
        ("shardy", '<@mesh, [{"y", "x"}, {}, {}]>', r"nearest is \(x, y\)"),
        ("shardy", '<@mesh, [{"x", ?}, {}, {}]>', "open dim"),
        ("shardy", '<@mesh, [{"y":(1)2}, {}, {}]>', "part of a mesh axis"),
        ("shardy", '<@mesh, [{"w"}, {}, {}]>', "unknown mesh axis"),
        ("shardy", '<@mesh, [{"x"}, {"x"}, {}]>', "splits two dims"),
        ("shardy", "nonsense", "not of the form"),
        ("jax", "PartitionSpec('x', None, None, None)", "4 dims"),
        ("jax", "PartitionSpec(1)", "unknown mesh axis '1'"),
        ("jax", "PartitionSpec('x',, 'y')", "not of the form"),
        ("shardy", "<@mesh, [{x}, {}, {}]>", "no quoted name"),
        ("mindspore", "device_matrix=(4, 2) tensor_map=(1, -1, -1)", "device matrix must be"),
        ("mindspore", "device_matrix=(2, 4) tensor_map=(2, -1, -1)", "none of the places"),
        ("mindspore", "device_matrix=(2, 4)", "not of the form"),
        ("gspmd", "{devices=[3,1,1]<=[3]}", "does not assign"),
        ("gspmd", "{devices=[8,1,1]<=[4,2]T(1,0)}", "no layout on the mesh"),
        ("gspmd", "{maximal device=0}", "not of the form"),
        ("gspmd", "{devices=[2,,4]<=[8]}", "a number is missing"),
        ("gspmd", "{devices=[" + "9" * 5000 + "]<=[8]}", "too long"),
        ("oneflow", "[S(" + "9" * 5000 + "), B]", "too long"),
        ("dtensor", "Shard(" + "9" * 5000 + "), Replicate()", "too long"),
        ("autopar", "S" + "9" * 5000 + " R", "too long"),
        ("dtensor", "(Shard(0), Ragged())", "none of DTensor's"),
        ("oneflow", "[S(0), X]", "none of OneFlow's"),
        ("oneflow", "[S(0)]", "1 placements"),
        ("autopar", "S0 Q", "none of"),
    ],
)
def test_bad_texts_are_refused(notation: str, text: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        read_layout(notation, text, Mesh.of(x=2, y=4), RANK)


def test_an_axis_of_one_device_holds_copies_in_gspmd() -> None:
    mesh = Mesh.of(one=1, four=4)
    for layout, read in (("S2 S0", "R S0"), ("S1 R", "R R"), ("R S2", "R S2")):
        text = write_layout("gspmd", parse_layout(layout), mesh, RANK)
        assert format_layout(read_layout("gspmd", text, mesh, RANK)) == read


ODD = (Mesh.of(a=6), Mesh.of(dp=3, tp=5), Mesh.of(x=2, y=3, z=2, w=2))


def test_random_layouts_come_back_and_damaged_texts_are_refused_or_read() -> None:
    rng = random.Random(20)
    for _ in range(600):
        name = rng.choice(sorted(NOTATIONS))
        mesh = rng.choice(ODD)
        rank = rng.randint(1, 5)
        says = NOTATIONS[name].says
        kinds = [
            R,
            B,
            *map(S, range(rank)),
            *([P] if "P" in says else []),
            *([S(rank - 1, 3)] if "parts" in says else []),
        ]
        layout = tuple(rng.choice(kinds) for _ in mesh.axes)
        text = write_layout(name, layout, mesh, rank)
        assert read_layout(name, text, mesh, rank) == (
            layout if "B" in says else without_gradient(layout)
        ), (name, text)
        letters = list(text)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(letters))
            letters[place : place + rng.randint(0, 1)] = rng.choice(
                "0123456789,()[]{}<>=-T\"'xSRPB \n\x1b"
            )
        with contextlib.suppress(AutoparError):
            read_layout(name, "".join(letters), mesh, rank)


def test_unknown_notation_names_the_valid_ones() -> None:
    with pytest.raises(UsageError, match="dtensor, oneflow"):
        write_layout("flax", (R,), Mesh.of(x=2), 1)


def test_a_tensor_map_counts_from_the_right() -> None:
    assert tensor_layout(parse_layout("R S0"), Mesh.of(a=2, b=4), 1).tensor_map == (0,)
    assert Place(mesh=Mesh.of(a=2), rank=1).names == ("a",)


@pytest.mark.parametrize(
    "placements",
    [
        (Shard(0), Replicate()),
        (Replicate(), Shard(1)),
        (Partial(), Replicate()),
        (Shard(0), Shard(0)),
        (Partial("max"), Shard(2)),
    ],
    ids=str,
)
def test_placements_themselves_go_both_ways(placements: tuple[Placement, ...]) -> None:
    layout = layout_of(placements)
    assert placements_of(layout, (2, 4)) == placements
    assert read_layout("dtensor", repr(placements), Mesh.of(x=2, y=4), RANK) == layout


def test_strided_placements_go_both_ways() -> None:
    layout = parse_layout("S1/3 R")
    assert layout_of(placements_of(layout, (2, 4))) == layout
    assert repr(placements_of(layout, (2, 4))) == write_layout(
        "dtensor", layout, Mesh.of(x=2, y=4), RANK
    )
    assert all(p.kind is not Kind.BROADCAST for p in layout) and torch.__version__
