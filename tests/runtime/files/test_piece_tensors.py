"""Shards in several pieces describe themselves to `torch.distributed.checkpoint`, and DTensor stays
as torch has it.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate

from autopar.runtime.files.piece_tensors import PieceTensor, Run, in_pieces, pieces_of, runs_of
from autopar.runtime.launch import run_ranks
from autopar.runtime.parameters.storage import Storage
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.sharding.layout import parse_layout
from tests.runtime.helpers import mesh_of

WHOLE = torch.arange(96, dtype=torch.float64).view(12, 8)

MADE: dict[str, Callable[[DTensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "detach": lambda value: value.detach(),
    "clone": lambda value: value.clone(),
    "in place": lambda value: value.clone().mul_(2.0),
    "arithmetic": lambda value: value * 2.0 + value,
    "a copy": copy.deepcopy,
    "another type": lambda value: value.float(),
    "foreach": lambda value: torch._foreach_add([value, value], [value, value])[1],
    "a parameter": lambda value: nn.Parameter(value),
    "a parameter's copy": lambda value: copy.deepcopy(nn.Parameter(value)),
}


@pytest.mark.parametrize(
    ("size", "cuts", "runs"),
    [
        (8, [], [Run(0, 0, 8)]),
        (8, [(1, 2, 1)], [Run(0, 4, 4)]),
        (12, [(3, 2, 0)], [Run(0, 0, 2), Run(2, 4, 2), Run(4, 8, 2)]),
        (12, [(1, 2, 1), (3, 2, 0)], [Run(0, 6, 1), Run(1, 8, 1), Run(2, 10, 1)]),
        (4, [(2, 2, 1), (2, 1, 0)], [Run(0, 1, 1), Run(1, 3, 1)]),
    ],
)
def test_runs(size: int, cuts: list[tuple[int, int, int]], runs: list[Run]) -> None:
    assert runs_of(size, cuts) == runs


def _compiled_step(layout: str) -> bool:
    """An optimizer whose step is compiled, on pieces; its state tells them, too."""
    pair = [nn.Parameter(_placed(layout, 2)) for _ in range(2)]
    for value, wrap in zip(pair, (torch.compile, lambda step, **_: step), strict=True):
        optimizer = torch.optim.SGD([value], lr=0.1, momentum=0.9)
        step = wrap(optimizer.step, backend="aot_eager")
        for _ in range(2):
            value.grad = _placed(layout, 2)
            step()
        assert isinstance(optimizer.state[value]["momentum_buffer"], PieceTensor)
    return torch.allclose(pair[0].detach().full_tensor(), pair[1].detach().full_tensor())  # type: ignore[attr-defined]


def test_a_compiled_step_on_pieces() -> None:
    assert run_ranks(_compiled_step, 2, "S0/3") == [True, True]


def _placed(layout: str, ranks: int) -> DTensor:
    mesh = mesh_of((ranks,))
    groups = DeviceGroups.create(mesh)
    layouts = {"w": parse_layout(layout)}
    storage = Storage(mesh, layouts, groups, 0, torch.device("cpu"), plain=False)
    actual = storage.placed("w", WHOLE)
    assert isinstance(actual, DTensor)
    return actual


def _classes() -> dict[str, tuple[bool, bool]]:
    """Whether what is made of a shard in pieces describes its pieces, and equals what is made of an
    ordinary DTensor.
    """
    mine = _placed("S0/3", 2)
    other = DTensor.from_local(
        mine._local_tensor,
        mine.device_mesh,
        mine.placements,
        shape=WHOLE.shape,
        stride=WHOLE.stride(),
    )
    assert type(other) is DTensor and len(pieces_of(other)) == 3
    results = {}
    for name, make in MADE.items():
        made = make(mine)
        same = torch.equal(made.detach().full_tensor(), make(other).detach().full_tensor())  # type: ignore[attr-defined]
        results[name] = isinstance(made, PieceTensor), same
    kept = mine.clone()
    assert kept.add_(1.0) is kept and isinstance(
        kept.redistribute(placements=[Replicate()]), DTensor
    )
    whole = _placed("S0", 2)
    assert type(whole) is DTensor and type(in_pieces(whole)) is DTensor
    return results


def test_what_is_made_of_pieces_describes_them() -> None:
    for result in run_ranks(_classes, 2):
        assert result == dict.fromkeys(MADE, (True, True))


def _trained(layout: str, ranks: int) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    value = nn.Parameter(_placed(layout, ranks))
    optimizer = torch.optim.AdamW([value], lr=0.1)
    value.grad = _placed(layout, ranks)
    optimizer.step()
    return value, optimizer


def _saved(folder: str, save: str, load: str, ranks: int) -> bool:
    """Save a parameter and its optimizer's state in one layout, load them in another."""

    def states(layout: str) -> dict[str, Tensor]:
        value, optimizer = _trained(layout, ranks)
        return {"value": value.detach(), **optimizer.state[value]}

    first = states(save)
    second = {name: torch.zeros_like(value) for name, value in states(load).items()}
    dcp.save(first, checkpoint_id=folder)
    dcp.load(second, checkpoint_id=folder)
    whole = [
        {n: v.full_tensor() if isinstance(v, DTensor) else v for n, v in values.items()}
        for values in (first, second)
    ]
    return all(torch.equal(whole[0][name], whole[1][name]) for name in first) and len(first) == 4


PAIRS = (("S0/3", "S0"), ("S0", "S0/3"), ("S0/3", "S1/2"), ("S1/2", "R"))


def _all_saved(folder: str, ranks: int) -> list[bool]:
    return [
        _saved(str(Path(folder, str(number))), save, load, ranks)
        for number, (save, load) in enumerate(PAIRS)
    ]


@pytest.mark.parametrize("ranks", [1, 2])
def test_states_between_layouts(ranks: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert run_ranks(_all_saved, ranks, folder, ranks) == [[True] * len(PAIRS)] * ranks


def test_torch_is_left_alone() -> None:
    """Importing the runtime changes no method of torch's classes, of which other code in the
    process may make use.

    Nor does it bring the compiler in where nobody compiles: it takes a second to import.
    """
    script = (
        "import sys\nfrom torch.distributed.tensor import DTensor\nbefore = dict(vars(DTensor))\n"
        "import autopar.runtime.module.parallel_module, autopar.runtime.parallelize\nassert "
        "dict(vars(DTensor)) == before\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
