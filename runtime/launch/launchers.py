"""The place of this process among all ranks, as its launcher's environment tells it.

    launcher          rank                   all ranks               rank of its machine
    torchrun, Ray,    RANK                   WORLD_SIZE              LOCAL_RANK
    Kubernetes
    Open MPI          OMPI_COMM_WORLD_RANK   OMPI_COMM_WORLD_SIZE    OMPI_COMM_WORLD_LOCAL_RANK
    MPICH, Intel MPI  PMI_RANK               PMI_SIZE                MPI_LOCALRANKID
    srun              SLURM_PROCID           SLURM_STEP_NUM_TASKS    SLURM_LOCALID

A launcher of the table starts the next one on every machine (mpirun by srun, torchrun by either),
so the first row that is set counts. A single process of a row other than the first is no rank: an
allocation of Slurm sets such variables for every program.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import RunError


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """The environment variables of one launcher.

    `local_world`: the number of ranks of this machine; "" where it is told in another form.
    """

    name: str
    rank: str
    world: str
    local_rank: str
    local_world: str = ""


LAUNCHERS = (
    Launcher(
        name="torchrun",
        rank="RANK",
        world="WORLD_SIZE",
        local_rank="LOCAL_RANK",
        local_world="LOCAL_WORLD_SIZE",
    ),
    Launcher(
        name="Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        world="OMPI_COMM_WORLD_SIZE",
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_world="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    Launcher(
        name="MPICH",
        rank="PMI_RANK",
        world="PMI_SIZE",
        local_rank="MPI_LOCALRANKID",
        local_world="MPI_LOCALNRANKS",
    ),
    Launcher(
        name="srun", rank="SLURM_PROCID", world="SLURM_STEP_NUM_TASKS", local_rank="SLURM_LOCALID"
    ),
)
MEETING = ("MASTER_ADDR", "MASTER_PORT")
"""The address at which the ranks meet: a host that all reach, and a free port of rank 0 there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRank:
    """The place of a launched process.

    `local_rank`, `local_world`: among the ranks of its machine; None where no variable tells it.
    """

    launcher: str
    rank: int
    world: int
    local_rank: int | None
    local_world: int | None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> LaunchedRank | None:
        """The place that the environment tells; None: this process was started alone.

        Raises `RunError` if a variable is missing or no number.
        """
        rows = [row for row in LAUNCHERS if _starts_ranks(row, environment)]
        if not rows:
            return None
        first = rows[0]
        rank = _number(environment, first.rank)
        world = _number(environment, first.world)
        if not 0 <= rank < world:
            raise RunError(f"{first.rank} is {rank}, which is no rank of {first.world}={world}")
        # RANK is often copied from the launcher's own variable, and LOCAL_RANK forgotten.
        local = next((row for row in rows if _tells_local(row, environment, rank, world)), None)
        return cls(
            launcher=first.name,
            rank=rank,
            world=world,
            local_rank=None if local is None else _number(environment, local.local_rank),
            local_world=(
                None
                if local is None or local.local_world not in environment
                else _number(environment, local.local_world)
            ),
        )


def require_launched(environment: Mapping[str, str]) -> LaunchedRank:
    """The place of this process; raises `RunError` that names what the environment lacks."""
    place = LaunchedRank.of(environment)
    missing = [name for name in MEETING if name not in environment]
    if place is None:
        missing = ["RANK", "WORLD_SIZE", *missing]
    elif missing and place.launcher == "srun":
        raise RunError(
            f"srun started this process, but {' and '.join(missing)} not set: before srun, export "
            'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) '
            "MASTER_PORT=29500"
        )
    if place is None or missing:
        raise RunError(
            f"{', '.join(missing)} not set: start this program with torchrun,"
            " e.g. `torchrun --nproc-per-node 4 train.py`"
        )
    return place


def launched() -> LaunchedRank | None:
    """The place that this process's environment tells; None: it was started alone."""
    return LaunchedRank.of(os.environ)


def launched_first() -> bool:
    """Whether this process is the first rank of its launcher, or was started alone."""
    place = launched()
    return place is None or place.rank == 0


def _starts_ranks(row: Launcher, environment: Mapping[str, str]) -> bool:
    """Whether the environment has the variables of a launcher that started several ranks."""
    if row.rank not in environment:
        return False
    return row is LAUNCHERS[0] or environment.get(row.world, "1") != "1"


def _tells_local(row: Launcher, environment: Mapping[str, str], rank: int, world: int) -> bool:
    """Whether a launcher's local rank is that of rank `rank` of `world`."""
    if row.local_rank not in environment:
        return False
    return (_number(environment, row.rank), _number(environment, row.world)) == (rank, world)


def _number(environment: Mapping[str, str], name: str) -> int:
    """A variable as a number."""
    if name not in environment:
        raise RunError(f"{name} not set: the launcher must tell every rank, as torchrun does")
    try:
        return int(environment[name])
    except ValueError:
        raise RunError(f"{name} is {environment[name]!r}, which is no number") from None
