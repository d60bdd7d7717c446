"""Every primitive against its formula on forked ranks, groups, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.errors import AutoparError, RunError, UsageError
from autopar.integrations import communication as comm
from autopar.runtime import torch_versions
from autopar.runtime.launch import backends, environment, run_ranks
from autopar.runtime.launch.devices import Claim
from autopar.runtime.torch_versions import CHECKS_COLLECTIVES

RANKS = 3
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64)
ANY = (*DTYPES, torch.bool, torch.int16, torch.complex64)
OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "min": lambda x: x.amin(0),
    "max": lambda x: x.amax(0),
    "product": lambda x: x.prod(0),
}
"""What each reduction makes of the ranks' tensors, stacked."""


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    yield
    autopar.reset_auto_parallel_context()


def _held(rank: int, dtype: torch.dtype) -> Tensor:
    """The values of a rank: small whole numbers, which every type adds up and multiplies exactly; a
    strided view.
    """
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-2, 3, (4, 6), generator=generator).to(dtype).T


def _exact(name: str, actual: Tensor | None, wanted: Tensor | None) -> None:
    assert (actual is None) == (wanted is None), name
    if actual is not None and wanted is not None:
        assert actual.dtype == wanted.dtype and actual.shape == wanted.shape, name
        assert torch.equal(actual, wanted), (name, actual.dtype)


def _reductions() -> None:
    me = comm.get_rank()
    for dtype in DTYPES:
        every = torch.stack([_held(rank, dtype) for rank in range(RANKS)])
        own = _held(me, dtype)
        for op, reduced in OPERATIONS.items():
            whole = reduced(every).to(dtype)
            before = own.clone()
            _exact(f"all_reduce {op}", comm.all_reduce(own, op), whole)
            _exact(f"reduce {op}", comm.reduce(own, 1, op), whole if me == 1 else None)
            _exact(f"reduce_scatter {op}", comm.reduce_scatter(own, op), whole.chunk(RANKS)[me])
            assert torch.equal(own, before)


def _moves() -> None:
    me = comm.get_rank()
    for dtype in ANY:
        every = [_held(rank, dtype) for rank in range(RANKS)]
        own = every[me]
        _exact("broadcast", comm.broadcast(own, 2), every[2].contiguous())
        _exact("gather", comm.gather(own, 1), torch.cat(every) if me == 1 else None)
        _exact("all_gather", comm.all_gather(own), torch.cat(every))
        _exact("scatter", comm.scatter(own, 2), every[2].chunk(RANKS)[me])
        _exact(
            "all_to_all",
            comm.all_to_all(own),
            torch.cat([value.chunk(RANKS)[me] for value in every]),
        )
        if me == 0:
            comm.send(own, 2)
        elif me == 2:
            _exact("recv", comm.recv(own, 0), every[0])
        comm.barrier()


def _numbers() -> None:
    """Tensors of no dims are moved and added up as well; gathers make rows of them."""
    value = torch.tensor(float(comm.get_rank() + 1))
    assert float(comm.all_reduce(value)) == 6.0 and comm.all_reduce(value).shape == ()
    assert comm.broadcast(value, 1).shape == () and float(comm.broadcast(value, 1)) == 2.0
    assert comm.all_gather(value).tolist() == [1.0, 2.0, 3.0]


def _several() -> None:
    """Tensors travel as one message for each type, and come back in their order and shapes."""
    me = comm.get_rank()
    every = [
        [
            _held(rank, torch.float32),
            torch.tensor(float(rank)),
            _held(rank, torch.int64),
            torch.ones(0, 2),
        ]
        for rank in range(RANKS)
    ]
    counted: Counter[str] = Counter()

    def counting(module: ModuleType, name: str) -> Callable[..., Any]:
        plain = getattr(module, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += 1
            return plain(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patched:
        for module, name in ((dist, "all_reduce"), (torch_versions, "all_gather_single")):
            patched.setattr(module, name, counting(module, name))
        for op, reduced in OPERATIONS.items():
            for place, summed in enumerate(comm.all_reduce(every[me], op)):
                stacked = torch.stack([held[place] for held in every])
                _exact(f"all_reduce {op} of several", summed, reduced(stacked).to(stacked.dtype))
        for place, summed in enumerate(comm.all_gather(every[me])):
            _exact(
                "all_gather of several",
                summed,
                torch.cat([torch.atleast_1d(held[place]) for held in every]),
            )
        assert comm.all_reduce([]) == []
    assert counted == {"all_reduce": 2 * len(OPERATIONS), "all_gather_single": 2}


def _groups() -> list[Any]:
    me = comm.get_rank()
    comm.create_group("ends", [2, 0])
    result: list[Any] = [comm.get_group_size(), comm.get_group_size("ends")]
    if me != 1:
        assert comm.all_gather(torch.tensor([me]), "ends").tolist() == [0, 2]
        assert comm.get_rank("ends") == [0, None, 1][me]
        assert (
            comm.get_world_rank_from_group_rank("ends", 1) == 2
            and comm.get_group_rank_from_world_rank(0, "ends") == 0
        )
        assert float(comm.all_reduce(torch.ones(1), group=[0, 2])) == 2.0
    else:
        with pytest.raises(UsageError, match="rank 1 is none of the group"):
            comm.all_reduce(torch.ones(1), group="ends")
    comm.destroy_group("ends")
    with pytest.raises(UsageError, match="valid are world"):
        comm.get_group_size("ends")
    assert float(comm.all_reduce(torch.ones(1), group=dist.group.WORLD)) == 3.0
    return result


def _refused() -> None:
    rows: list[tuple[Callable[[], object], str]] = [
        (lambda: comm.all_reduce(torch.ones(1), "mean"), "valid are sum, min, max, product"),
        (lambda: comm.all_reduce(torch.ones(1, dtype=torch.bool)), "cast it to one of"),
        (lambda: comm.reduce_scatter(torch.ones(4)), "does not divide into 3"),
        (lambda: comm.scatter(torch.tensor(1.0)), "does not divide"),
        (lambda: comm.create_group("world", [0]), "already"),
        (lambda: comm.create_group("g", [0, 7]), "distinct ranks from 0 to 2"),
        (lambda: comm.create_group("g", []), "distinct ranks"),
        (lambda: comm.get_world_rank_from_group_rank(None, 3), "not 3"),
        (lambda: comm.get_group_rank_from_world_rank(5, None), "rank 5"),
        (lambda: comm.send(torch.ones(1), 3), "no other rank"),
        (lambda: comm.init("nccl"), "process group's backend is"),
        (lambda: comm.init("ucx"), "valid are nccl, gloo, hccl, mpi"),
    ]
    for call, why in rows:
        with pytest.raises(UsageError, match=why):
            call()
    comm.init()  # there is a group: it is taken
    comm.init("gloo")


@pytest.mark.parametrize(
    "work",
    [
        *(_reductions, _moves, _numbers, _several, _groups),
        pytest.param(_refused, marks=pytest.mark.gloo),
    ],
    ids=lambda f: f.__name__.strip("_"),
)
def test_on_ranks(work: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if CHECKS_COLLECTIVES:
        monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    run_ranks(work, RANKS, timeout=60)


def _reversed(port: int) -> tuple[int, int, int]:
    before = dist.get_rank()
    comm.destroy()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="9", WORLD_SIZE="9")
    autopar.set_auto_parallel_context(device_num=2, global_rank=1 - before)
    comm.init("gloo")
    return before, comm.get_rank(), int(comm.all_reduce(torch.tensor(1)))


def test_the_context_numbers_the_ranks() -> None:
    from torch.distributed import TCPStore  # a port that is free

    port = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False).port
    assert run_ranks(_reversed, 2, port, timeout=60) == [(0, 1, 2), (1, 0, 2)]


@pytest.mark.parametrize(
    ("backend", "why"),
    [
        ("nccl", "needs CUDA"),
        ("hccl", "torch_npu"),
        ("mpi", "built with MPI"),
        ("gloo", "start this program with torchrun"),
    ],
)
def test_backends_that_are_not_there_are_refused(
    backend: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "nccl" and torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(AutoparError, match=why):
        comm.init(backend)


@pytest.mark.parametrize(
    ("cuda", "npu", "asked", "chosen", "device"),
    [
        (False, False, None, "gloo", "cpu"),
        (False, True, None, "hccl", "npu"),
        (True, True, None, "nccl", "cuda"),
        (True, False, "gloo", "gloo", "cpu"),
        (False, True, "hccl", "hccl", "npu"),
        (False, False, "mpi", "mpi", "cpu"),
    ],
)
def test_the_backend_is_that_of_the_device_or_the_one_that_is_asked_for(
    cuda: bool,
    npu: bool,
    asked: str | None,
    chosen: str,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MPI's launcher numbers the ranks itself; all others are told by the environment."""
    begun: list[tuple[str, str]] = []
    there = {"torch_npu"} if npu else set()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: cuda)
    monkeypatch.setattr(dist, "is_mpi_available", lambda: True)
    monkeypatch.setattr(backends, "find_spec", lambda name: object() if name in there else None)
    monkeypatch.setattr(environment, "own_device", lambda kind: SimpleNamespace(type=kind))
    monkeypatch.setattr(dist, "init_process_group", lambda name: begun.append((name, "cpu")))
    monkeypatch.setattr(
        environment,
        "_init",
        lambda name, store, rank, world, limit, own: begun.append((name, own.type)),
    )
    monkeypatch.setattr(Claim, "of", lambda name, own: Claim(backend=name))
    for name, value in {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
    }.items():
        monkeypatch.setenv(name, value)
    comm.init(asked)
    assert begun == [(chosen, device)]


def test_without_ranks_there_are_no_numbers() -> None:
    with pytest.raises(RunError, match="there is no process group"):
        comm.get_rank()


def test_the_words_are_there_without_torch() -> None:
    program = (
        "import sys, "
        "autopar\nautopar.communication.all_reduce\nautopar.set_auto_parallel_context\nassert "
        "'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
