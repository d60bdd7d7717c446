"""Runs many scripts on one set of ranks: a script that breaks the ranks is noted, and the others go
on with fresh ones.

Every rank leaves a file for each script, and goes on when all ranks have left theirs.
"""

from __future__ import annotations

import importlib
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from autopar.errors import AutoparError, RunError
from autopar.runtime.launch import run_ranks
from tests.end_to_end.scripts.table import Make, Script, Values

from . import making

TIMEOUT = 60.0
"""Seconds that the ranks have for the scripts of a scheme, and for a collective, with one more for
each script; no script may hang.
"""
PATIENCE = 10.0
"""Seconds that a rank waits for the others at the end of a script."""


REFUSALS = (
    "of which a planned module has only",
    "in-place operations that require placement changes",
)
"""What is refused as Python has it, with an `AttributeError`, and what torch refuses to do to a
DTensor.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of a script on one rank: its values, or an error; `known`: one of autopar, which
    the caller is meant to read.
    """

    values: Values | None = None
    error: str = ""
    known: bool = False
    trace: str = ""


Outcomes = dict[str, tuple[Outcome, ...]]
"""By script: of every rank."""


def run_original(scripts: Sequence[Script]) -> Outcomes:
    """On one device, without a plan."""
    return run_each(
        [script for script in scripts if script.reference == "original"], making.original, 1
    )


def run_on_one_rank(scripts: Sequence[Script]) -> Outcomes:
    """Run the scripts whose random numbers are those of a plan, under a plan for one rank."""
    wanted = [script for script in scripts if script.reference == "one rank"]
    if wanted:
        making.prepare(making.ONE_RANK)
    return run_each(wanted, making.planned(making.ONE_RANK), 1)


def run_planned(scripts: Sequence[Script], scheme: str) -> Outcomes:
    """On the ranks of a plan."""
    making.prepare(scheme)
    return run_each(scripts, making.planned(scheme), making.RANKS)


def run_each(scripts: Sequence[Script], make: Make, nproc: int) -> Outcomes:
    # What optimizers import on first use takes seconds: once here, not in all ranks.
    importlib.import_module("torch._dynamo")
    results: Outcomes = {}
    pending = list(scripts)
    while pending:
        some = _try(pending, make, nproc)
        results |= some
        # A script that failed in another way than by an error of autopar may have left anything
        # behind.
        pending = pending[len(some) :]
    return results


def _try(scripts: Sequence[Script], make: Make, nproc: int) -> Outcomes:
    """The outcomes of the first scripts, down to the first that broke the ranks; at least one."""
    with tempfile.TemporaryDirectory() as folder:
        broken = "the ranks stopped before it"
        try:
            run_ranks(
                _on_rank, nproc, scripts, make, nproc, Path(folder), timeout=TIMEOUT + len(scripts)
            )
        except RunError as error:
            broken = str(error)
        results: Outcomes = {}
        for number, script in enumerate(scripts):
            ranks = [_read(_file(Path(folder), number, rank)) for rank in range(nproc)]
            if all(outcome is None for outcome in ranks) and results:
                break
            results[script.name] = tuple(
                o if o is not None else Outcome(error="no end", trace=broken) for o in ranks
            )
            if any(outcome is None or (outcome.error and not outcome.known) for outcome in ranks):
                break
        return results


def _file(folder: Path, number: int, rank: int) -> Path:
    return folder / f"{number}.{rank}"


def _read(path: Path) -> Outcome | None:
    if not path.exists():
        return None
    outcome: Outcome = pickle.loads(path.read_bytes())
    return outcome


def _on_rank(scripts: Sequence[Script], make: Make, nproc: int, folder: Path) -> None:
    """One rank's life."""
    rank = dist.get_rank()
    torch.set_num_threads(1)
    for number, script in enumerate(scripts):
        torch.manual_seed(0)
        outcome = _outcome(script.run, make)
        part = folder / f"part.{rank}"
        part.write_bytes(pickle.dumps(outcome))
        part.rename(_file(folder, number, rank))
        if outcome.error and not outcome.known:
            raise RuntimeError(f"script {script.name}: {outcome.trace}")
        deadline = time.monotonic() + PATIENCE
        while not all(_file(folder, number, other).exists() for other in range(nproc)):
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"script {script.name}: rank {rank} is done, another is not; "
                    f"{outcome.error or 'no error'}"
                )
            time.sleep(1e-3)


def _outcome(run: Callable[[Make], Values], make: Make) -> Outcome:
    try:
        return Outcome(
            values={
                name: value if isinstance(value, float) else value.cpu()
                for name, value in run(make).items()
            }
        )
    except Exception as error:
        message = f"{type(error).__name__}: {error}"
        known = isinstance(error, AutoparError) or any(words in str(error) for words in REFUSALS)
        return Outcome(error=message, known=known, trace=traceback.format_exc())
