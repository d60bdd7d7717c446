"""Several tensors in one message: what each of them would be by itself, for every step, into memory
that is there too.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Sequence

import pytest
import torch
from torch import Tensor

from autopar.runtime.execution.collective_log import CollectiveLog
from autopar.runtime.launch import run_ranks
from autopar.runtime.ranks.device_groups import AxisGroup, DeviceGroups
from autopar.runtime.redistribution.flat_messages import Moving, carry, flat_rows
from autopar.runtime.redistribution.steps import Move, act, step_actions
from autopar.sharding.layout import local_shape, parse_layout
from autopar.sharding.redistribution import changed_axes
from tests.runtime.helpers import mesh_of

pytestmark = pytest.mark.usefixtures("strict_collectives")

MESH = (2, 2)
SHAPES = [(12, 8), (24, 4, 2), (12, 16)]
CHAINS = {
    "gather": ["S0 R", "R R"],
    "gather fused parts": ["S0/3 R", "R R"],
    "gather on both axes": ["S0 S0", "S0 R", "R R"],
    "gather a share": ["R S1", "R B"],
    "scatter": ["P R", "S0 R"],
    "scatter parts": ["R P", "R S0/3"],
    "sum": ["P R", "R R"],
    "sum to shares": ["R P", "R B"],
    "exchange": ["S0 R", "S1 R"],
    "exchange parts": ["R S0/3", "R S1/2"],
    "take": ["R R", "S0 R"],
    "shares to a split": ["R B", "R S0"],
    "one's own of a sum": ["R R", "R P"],
    "exchange and gather": ["S0 R", "S1 R", "B R"],
    "gather and take": ["S0 R", "R R", "R S1"],
}

Steps = list[tuple[list[Move], AxisGroup]]


def _steps(texts: Sequence[str], groups: DeviceGroups, *, back: bool) -> Steps:
    """The steps of a chain of layouts for every tensor, or those of its gradient."""
    results: Steps = []
    for before, after in itertools.pairwise([parse_layout(text) for text in texts]):
        results.append(
            (
                [step_actions(before, after, MESH)[back]] * len(SHAPES),
                groups.over(changed_axes(before, after)),
            )
        )
    return results[::-1] if back else results


def _values(text: str, rank: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    shapes = [local_shape(parse_layout(text), shape, MESH) for shape in SHAPES]
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * 10).to(dtype)
        for shape in shapes
    ]


def _ended(carried: Generator[Tensor, Tensor, list[Tensor]]) -> list[Tensor]:
    results: list[list[Tensor]] = []

    def kept() -> Generator[Tensor, Tensor, None]:
        results.append((yield from carried))

    Moving(kept()).finish()
    return results[0]


def _wrong() -> list[str]:
    """The chains that do not carry tensors together as they would go one by one."""
    groups = DeviceGroups.create(mesh_of(MESH))
    wrong = []
    for (name, texts), back in itertools.product(CHAINS.items(), (False, True)):
        steps = _steps(texts, groups, back=back)
        given = _values(texts[-1] if back else texts[0], groups.rank, torch.float64)
        alone = given
        for actions, group in steps:
            alone = [
                act(value, action, group) for value, action in zip(alone, actions, strict=True)
            ]
        flat = _ended(carry(given, steps))
        into = [torch.full_like(value, -1.0) for value in alone]
        written = _ended(carry(given, steps, lambda into=into: into))
        same = all(
            torch.equal(a, b) and torch.equal(a, c)
            for a, b, c in zip(alone, flat, into, strict=True)
        )
        if not same or any(a is not b for a, b in zip(written, into, strict=True)):
            wrong.append(f"{name}{' back' if back else ''}")
    return wrong


def _moved_as_bytes() -> list[str]:
    """Types that a backend cannot carry."""
    groups = DeviceGroups.create(mesh_of(MESH))
    wrong = []
    for name, dtype in itertools.product(
        ("gather", "exchange"), (torch.bool, torch.int16, torch.float8_e4m3fn, torch.bfloat16)
    ):
        steps = _steps(CHAINS[name], groups, back=False)
        given = _values(CHAINS[name][0], groups.rank, dtype)
        ((actions, group),) = steps
        alone = [act(value, action, group) for value, action in zip(given, actions, strict=True)]
        flat = _ended(carry(given, steps))
        if any(
            a.dtype != b.dtype or not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            for a, b in zip(alone, flat, strict=True)
        ):
            wrong.append(f"{name} of {dtype}")
    return wrong


def _counted() -> list[int]:
    """Collectives issued before a chain of two of them, at its start, behind its first step, and at
    its end.
    """
    groups = DeviceGroups.create(mesh_of(MESH))
    chain = CHAINS["gather on both axes"]
    with CollectiveLog() as log:
        issued = [len(log.issued)]
        given = _values(chain[0], groups.rank, torch.float64)
        moving = Moving(carry(given, _steps(chain, groups, back=False)))
        for go_on in (lambda: None, moving.go_on, moving.finish, moving.finish):
            go_on()
            issued.append(len(log.issued))
    return issued


def _all() -> tuple[list[str], list[str], list[int]]:
    return _wrong(), _moved_as_bytes(), _counted()


def test_together_as_one_by_one() -> None:
    """Types that no backend carries travel as bytes; a chain under way issues one collective for
    all tensors at a time.
    """
    assert run_ranks(_all, 4, timeout=60.0) == [([], [], [0, 1, 2, 2, 2])] * 4


def test_one_tensor_is_sent_from_where_it_lies() -> None:
    value = torch.arange(6.0).view(2, 3)
    assert flat_rows([value]).data_ptr() == value.data_ptr()
    assert flat_rows([value, value.view(2, 3, 1)]).tolist() == [
        [0, 1, 2, 0, 1, 2],
        [3, 4, 5, 3, 4, 5],
    ]


def test_on_one_device_nothing_is_sent() -> None:
    alone = AxisGroup("", 1, 0)
    (action, _) = step_actions(parse_layout("S0"), parse_layout("S1"), (1,))
    value = torch.arange(6.0).view(2, 3)
    into = [torch.empty(2, 3)]
    assert _ended(carry([value], [([action], alone)], lambda: into))[0] is into[0]
    assert torch.equal(into[0], value)
