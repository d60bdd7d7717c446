"""Ranks and their devices from the environments of launchers: each rank its own, or a reason."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from autopar.errors import RunError
from autopar.runtime.launch import device_of_group, devices, environment, run_ranks
from autopar.runtime.launch.backends import device_type
from autopar.runtime.launch.devices import Claim, claim, conflict, device_number
from autopar.runtime.launch.launchers import LAUNCHERS, LaunchedRank, require_launched

MEETING = {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "11", "WORLD_SIZE": "16", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}
SRUN = {
    "SLURM_PROCID": "11",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_LOCALID": "3",
    "SLURM_NTASKS": "16",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "11",
    "OMPI_COMM_WORLD_SIZE": "16",
    "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "8",
}
MPICH = {"PMI_RANK": "11", "PMI_SIZE": "16", "MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "8"}
PODS = {"RANK": "11", "WORLD_SIZE": "16"}
# mpirun inside an allocation starts a daemon on every node by srun, whose variables ranks inherit.
DAEMON = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "0"}

# Name -> environment, devices that the process sees, (launcher, rank, number of its device).
PLACES: dict[str, tuple[dict[str, str], int, tuple[str, int, int]]] = {
    "torchrun": (TORCHRUN, 8, ("torchrun", 11, 3)),
    "torchrun, one visible device a rank": (TORCHRUN, 1, ("torchrun", 11, 0)),
    "torchrun, two visible devices a rank": (TORCHRUN, 2, ("torchrun", 11, 0)),
    "torchrun under srun": (DAEMON | TORCHRUN, 8, ("torchrun", 11, 3)),
    "srun": (SRUN, 8, ("srun", 11, 3)),
    "srun, one visible device a task": (SRUN, 1, ("srun", 11, 0)),
    "srun, with RANK copied by hand": (SRUN | PODS, 8, ("torchrun", 11, 3)),
    "Open MPI": (OPEN_MPI, 8, ("Open MPI", 11, 3)),
    "Open MPI in an allocation of Slurm": (DAEMON | OPEN_MPI, 8, ("Open MPI", 11, 3)),
    "MPICH": (MPICH, 4, ("MPICH", 11, 0)),
    "MPICH, as many devices as ranks": (MPICH, 8, ("MPICH", 11, 3)),
    "pods of one device": (PODS, 1, ("torchrun", 11, 0)),
    "pods of eight devices with a rank each": (PODS | {"LOCAL_RANK": "0"}, 8, ("torchrun", 11, 0)),
    "one rank": ({"RANK": "0", "WORLD_SIZE": "1"}, 8, ("torchrun", 0, 0)),
}


@pytest.mark.parametrize("name", PLACES)
def test_the_launcher_tells_rank_and_device(name: str) -> None:
    variables, count, (launcher, rank, number) = PLACES[name]
    place = require_launched(variables | MEETING)
    assert (place.launcher, place.rank, device_number(place, count)) == (launcher, rank, number)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0"},
        {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0"},
        {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"},
    ],
)
def test_a_single_process_of_an_allocation_is_no_rank(variables: dict[str, str]) -> None:
    assert LaunchedRank.of(variables) is None
    assert device_number(None, 8) == 0


# Environment, devices that the process sees, the words of the error.
REFUSED: dict[str, tuple[dict[str, str], int, str]] = {
    "nothing": ({}, 1, "RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set.*torchrun"),
    "no number of ranks": ({"RANK": "0"} | MEETING, 1, "WORLD_SIZE not set"),
    "no number": ({"RANK": "zero", "WORLD_SIZE": "2"} | MEETING, 1, "RANK is 'zero'"),
    "a rank too many": (PODS | {"RANK": "16"} | MEETING, 1, "16, which is no rank of WORLD_SIZE"),
    "no port": (PODS | {"MASTER_ADDR": "a"}, 1, "^MASTER_PORT not set"),
    "srun without an address": (SRUN, 8, "export MASTER_ADDR=.*scontrol"),
    "pods of eight devices": (PODS | MEETING, 8, "rank 11 of 16 sees 8 devices.*set LOCAL_RANK"),
    "more tasks than devices": (SRUN | MEETING, 2, "local rank 3 has no device: .* sees 2"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_missing_is_named(name: str) -> None:
    variables, count, words = REFUSED[name]
    with pytest.raises(RunError, match=words):
        device_number(require_launched(variables), count)


@pytest.mark.parametrize(
    ("claims", "words"),
    [
        ([Claim(backend="gloo"), Claim(backend="gloo")], None),
        ([Claim(backend="nccl", device="a"), Claim(backend="nccl", device="b")], None),
        (
            [Claim(backend="nccl", device=name, host="node0") for name in "abcbb"],
            r"^ranks 1, 3, 4 on node0 use the same device \(b\): .*LOCAL_RANK",
        ),
        (
            [Claim(backend="nccl", device="a", host="node0"), Claim(backend="gloo", host="node1")],
            "rank 1 on node1 uses the backend gloo, and rank 0 on node0 uses nccl",
        ),
        (
            [
                Claim(backend="nccl", device="a"),
                Claim(backend="nccl", error="it has no GPU", host="node1"),
            ],
            "^rank 1 on node1 cannot take part: it has no GPU",
        ),
    ],
)
def test_all_ranks_hear_why_they_cannot_run(claims: list[Claim], words: str | None) -> None:
    store = HashStore()
    heard: dict[int, str] = {}

    def rank(number: int) -> None:
        try:
            claim(claims[number], store, number, len(claims))
            heard[number] = ""
        except RunError as error:
            heard[number] = str(error)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(len(claims))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert heard == dict.fromkeys(range(len(claims)), conflict(claims))
    if words is not None:
        with pytest.raises(RunError, match=words):
            raise RunError(heard[0])


class _Devices:
    """A stand-in for `torch.cuda` on a machine with `names` devices."""

    def __init__(self, names: str) -> None:
        self.names = names
        self.current = 0

    def device_count(self) -> int:
        return len(self.names)

    def current_device(self) -> int:
        return self.current

    def set_device(self, number: int) -> None:
        self.current = number

    def get_device_properties(self, device: torch.device) -> Any:
        return SimpleNamespace(uuid=self.names[device.index])


def _own_group(numbers: tuple[int, int]) -> str:
    """A script with a process group of its own, whose ranks have made these devices current."""
    stand_in = _Devices("ab")
    stand_in.set_device(numbers[dist.get_rank()])
    torch.get_device_module = lambda kind: stand_in
    devices.device_type = lambda backend: "cuda"
    try:
        return str(device_of_group()) + str(device_of_group())
    except RunError as error:
        return str(error)


@pytest.mark.gloo
def test_ranks_of_a_script_that_share_a_device_are_refused() -> None:
    assert run_ranks(_own_group, 2, (0, 1), timeout=60) == ["cuda:0cuda:0", "cuda:1cuda:1"]
    first, second = run_ranks(_own_group, 2, (0, 0), timeout=60)
    assert first == second and "ranks 0, 1 on" in first and "torch.cuda.set_device" in first


def _launched(names: Sequence[str], visible: Sequence[str], port: int) -> str:
    """A rank whose launcher has set variables, and shows it some of the devices."""
    rank = dist.get_rank()
    for row in LAUNCHERS:
        for name in (row.rank, row.world, row.local_rank, row.local_world):
            os.environ.pop(name, None)
    numbers = {name: "2" if name.endswith(("SIZE", "TASKS")) else str(rank) for name in names}
    os.environ.update(numbers, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    stand_in = _Devices(visible[rank])
    torch.get_device_module = lambda kind: stand_in
    environment.device_type = lambda backend: "cuda"
    # torch has no GPUs here, with which it could make the group. Ranks meet all the same, since the
    # store ends with the first of them.
    environment._init = lambda *arguments: dist.barrier()
    try:
        return str(environment.init_from_environment("gloo", timeout=30))
    except RunError as error:
        return str(error)


BOTH = ("ab", "ab")
MASKED = ("a", "b")
SAME = ("a", "a")
# Name -> what each rank sees, and the devices that they take, or the words that both hear.
MEETINGS: dict[str, tuple[Iterable[str], Sequence[str], Sequence[str]]] = {
    "torchrun": (TORCHRUN, BOTH, ("cuda:0", "cuda:1")),
    "torchrun, masked": (TORCHRUN, MASKED, ("cuda:0", "cuda:0")),
    "torchrun, one device": (TORCHRUN, SAME, ("use the same device (a)",)),
    "srun": (SRUN, BOTH, ("cuda:0", "cuda:1")),
    "srun, masked": (SRUN, MASKED, ("cuda:0", "cuda:0")),
    "srun, one device": (SRUN, SAME, ("use the same device (a)",)),
    "Open MPI": (OPEN_MPI, BOTH, ("cuda:0", "cuda:1")),
    "MPICH": (MPICH, BOTH, ("cuda:0", "cuda:1")),
    "pods": (PODS, MASKED, ("cuda:0", "cuda:0")),
    "pods that see all devices": (PODS, BOTH, ("set LOCAL_RANK",)),
    "pods, one of them without a device": (PODS, ("a", ""), ("cannot take part",)),
}


@pytest.mark.parametrize("name", MEETINGS)
def test_ranks_of_a_launcher_take_their_devices_or_hear_why_not(name: str) -> None:
    names, visible, wanted = MEETINGS[name]
    # A port that is free.
    port = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False).port
    told = run_ranks(_launched, 2, tuple(names), visible, port, timeout=60)
    if len(wanted) == 2:
        assert told == list(wanted)
    else:
        assert all(wanted[0] in text for text in told), told


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        ("gloo", "cpu"),
        ("nccl", "cuda"),
        ("hccl", "npu"),
        ("mpi", "cpu"),
        ("cpu:gloo,cuda:nccl", "cuda"),
        ("cpu:gloo,cuda:gloo", "cuda"),
        ("cuda:nccl", "cuda"),
    ],
)
def test_backends_carry_tensors_of_their_devices(backend: str, kind: str) -> None:
    assert device_type(backend) == kind


def test_every_launcher_has_variables_of_its_own() -> None:
    names = [name for row in LAUNCHERS for name in (row.rank, row.world, row.local_rank)]
    assert len(set(names)) == len(names)
