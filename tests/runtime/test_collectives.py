"""Every single-axis step and random chains on real ranks, against the definition of the kinds."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.distributed as dist

from autopar.runtime.collectives import DeviceGroups, cuts_of, shard_of
from autopar.runtime.launch import run_ranks
from autopar.runtime.redistribution import apply_chain, gather_full
from autopar.sharding.layout import Layout, format_layout, is_valid, parse_layout
from autopar.sharding.redistribution import is_step, steps_from

from .helpers import mesh_of
from .kinds import all_kinds, assemble, pieces

pytestmark = pytest.mark.usefixtures("strict_collectives")

Case = tuple[tuple[int, ...], tuple[Layout, ...]]
SHAPE = (8, 12, 16)


def run_cases(mesh: tuple[int, ...], cases: list[Case]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's value after each chain, and gradient before it."""
    groups = DeviceGroups.create(mesh_of(mesh))
    rank = dist.get_rank()
    out = []
    for seed, (shape, chain) in enumerate(cases):
        value, gradient = wholes(shape, seed)
        # Non-contiguous on purpose: a step must not care how its input lies in memory.
        local = pieces(value, chain[0], mesh, gradient=False, seed=seed)[rank]
        local = local.movedim(0, -1).contiguous().movedim(-1, 0).detach().requires_grad_()
        after = apply_chain(local, chain, groups, gradient=True)
        assert after.is_contiguous() or len(chain) == 1 or after.stride() == local.stride()
        after.backward(pieces(gradient, chain[-1], mesh, gradient=True, seed=seed)[rank].contiguous())
        assert local.grad is not None
        out.append((after.detach(), local.grad))
    return out


def wholes(shape: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 + seed)
    return torch.rand(shape, dtype=torch.float64, generator=generator), torch.rand(shape, dtype=torch.float64, generator=generator)


def check(mesh: tuple[int, ...], cases: list[Case]) -> None:
    ranks = 1
    for size in mesh:
        ranks *= size
    results = run_ranks(run_cases, ranks, mesh, cases)
    for seed, (shape, chain) in enumerate(cases):
        text = " -> ".join(map(format_layout, chain))
        value, gradient = wholes(shape, seed)
        got = assemble([result[seed][0] for result in results], chain[-1], mesh, shape, gradient=False)
        torch.testing.assert_close(got, value, msg=lambda m, text=text: f"value of {text}: {m}")
        back = assemble([result[seed][1] for result in results], chain[0], mesh, shape, gradient=True)
        torch.testing.assert_close(back, gradient, msg=lambda m, text=text: f"gradient of {text}: {m}")


@pytest.mark.parametrize("degree", [2, 4])
def test_single_axis_steps(degree: int) -> None:
    """All pairs of kinds, with splits of the first, a middle and the last dim, whole and within parts."""
    kinds = all_kinds({0: (1,), 1: (1, 3), 2: (1, 2)})
    pairs = [((b,), (a,)) for b, a in itertools.product(kinds, kinds) if is_step((b,), (a,), 0)]
    assert len(pairs) > 40
    check((degree,), [(SHAPE, pair) for pair in pairs])


@pytest.mark.parametrize("mesh", [(2, 2), (2, 2, 2)])
def test_random_chains(mesh: tuple[int, ...]) -> None:
    """Random walks over layouts of several axes, with splits that nest and splits within parts."""
    rng = random.Random(7)
    shape = (8, 24, 16)
    kinds = all_kinds({0: (1,), 1: (1, 3, 6), 2: (1, 2)})
    starts = [layout for layout in itertools.product(kinds, repeat=len(mesh)) if is_valid(layout, shape, mesh)]
    cases: list[Case] = []
    for _ in range(40):
        chain = [rng.choice(starts)]
        for _ in range(rng.randint(1, 5)):
            chain.append(rng.choice([after for _, after in steps_from(chain[-1], kinds, shape, mesh)]))
        cases.append((shape, tuple(chain)))
    check(mesh, cases)


def _other_dtypes() -> None:
    groups = DeviceGroups.create(mesh_of((2,)))
    split, other, partial, whole = (parse_layout(text) for text in ("S0", "S1/2", "P", "R"))
    whole_value = torch.arange(32).reshape(4, 8) % 5
    dtypes = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    for dtype in (*dtypes, torch.complex64, torch.float8_e4m3fn):
        value = whole_value.to(dtype)
        local = shard_of(value, cuts_of(split, (2,), groups.coordinate))
        moved = apply_chain(local, (split, other), groups, gradient=False)
        assert torch.equal(moved.cpu().float(), shard_of(value, cuts_of(other, (2,), groups.coordinate)).float()), dtype
        assert torch.equal(gather_full(moved, other, groups).float(), value.float()), dtype
        assert moved.dtype == dtype
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32):
        summed = apply_chain(torch.full((4, 8), groups.rank + 1).to(dtype), (partial, whole), groups, gradient=False)
        assert torch.equal(summed.float(), torch.full((4, 8), 3.0)), dtype
        mine = apply_chain(torch.full((4, 8), groups.rank + 1).to(dtype), (partial, split), groups, gradient=False)
        assert torch.equal(mine.float(), torch.full((2, 8), 3.0)), dtype


def test_other_dtypes() -> None:
    """Integers, booleans, half precision, complex and fp8 move and (where they can) add up."""
    run_ranks(_other_dtypes, 2)


def _maximum() -> float:
    groups = DeviceGroups.create(mesh_of((2,)))
    return float(apply_chain(torch.tensor([1.0 + groups.rank]), (parse_layout("P(max)"), parse_layout("R")), groups, gradient=False))


def test_partial_maximum() -> None:
    assert run_ranks(_maximum, 2) == [2.0, 2.0]
