"""The races: a planner of others and ours on the same model, one process after the other."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from .processes import Measured, measured

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(__file__).parent / "programs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Race:
    """A search of a rival.

    `program`, `arguments`: of `programs`. `ours`: the case of `ours.CASES`. `step`: the words
    before the step that the rival predicts (None: it predicts none). `remark`: on the row.
    """

    rival: str
    solver: str
    model: str
    devices: str
    program: str
    arguments: tuple[str, ...] = ()
    ours: str
    step: str | None = "STEP"
    remark: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """CPU seconds, peak bytes and predicted seconds of both; None where one of them said nothing.

    Seconds are of whole processes with their imports, but for the races on the same tables, which
    are of the searches alone and have costs for steps.
    """

    rival: str
    solver: str
    model: str
    devices: str
    rival_s: float | None
    rival_memory: float | None
    rival_step_s: float | None
    ours_s: float | None
    ours_memory: float | None
    ours_step_s: float | None
    remark: str

    @property
    def ratio(self) -> float | None:
        """The rival's CPU seconds for each of ours, where both came to an end."""
        if self.rival_s is None or self.ours_s is None:
            return None
        return self.rival_s / max(self.ours_s, 1e-9)

    @property
    def key(self) -> tuple[str, ...]:
        """The names of its race."""
        return self.rival, self.solver, self.model, self.devices

    def as_json(self) -> dict[str, Any]:
        """The row with its ratio."""
        return asdict(self) | {"ratio": self.ratio}

    @classmethod
    def of_json(cls, text: str) -> Row:
        """The row of a line that `as_json` made."""
        values = json.loads(text)
        return cls(**{field.name: values[field.name] for field in fields(cls)})


def of_autoparallel(model: str, layers: int, mesh: str, solver: str, remark: str = "") -> Race:
    """A search of autoparallel; its solvers beside the integer program are those of a branch."""
    branch = solver != "ilp"
    return Race(
        rival="autoparallel-branch" if branch else "autoparallel",
        solver={"ilp": "integer program (CBC)", "lp": "relaxation (CBC)", "approx": "TRW-S"}[
            solver
        ],
        model={"llama": "Llama-3-8B", "deepseek": "DeepSeek-V3, small"}[model]
        + f", {layers} layers",
        devices=mesh,
        program="of_autoparallel.py",
        arguments=(model, str(layers), mesh, solver),
        ours=f"{model}-{layers}",
        remark=remark,
    )


WRITTEN = "its module has all-to-alls of its own; ours plans the same sizes"
RACES: tuple[Race, ...] = (
    Race(
        rival="simumax",
        solver="all degrees",
        model="Llama-3-8B",
        devices="8 B200",
        program="of_simumax.py",
        arguments=("llama3-8b", "8", "64"),
        ours="simumax-8b",
    ),
    Race(
        rival="simumax",
        solver="all degrees",
        model="Llama-3-70B",
        devices="64 B200",
        program="of_simumax.py",
        arguments=("llama3-70b", "64", "256"),
        ours="simumax-70b",
    ),
    Race(
        rival="galvatron",
        solver="layers, one batch size",
        model="Llama-2-7B",
        devices="8 A100",
        program="of_galvatron.py",
        ours="galvatron-7b",
        step="Minized timecost =",
    ),
    Race(
        rival="hyper-parallel",
        solver="ND, first phase",
        model="DeepSeek-V3, 64 layers",
        devices="512",
        program="of_hyper_parallel.py",
        ours="hyper-deepseek",
        step=None,
        remark="it lists candidates by memory alone, and has their steps from runs on devices",
    ),
    of_autoparallel("llama", 4, "2x4", "ilp"),
    of_autoparallel("llama", 4, "2x4", "lp"),
    of_autoparallel("llama", 4, "2x4", "approx"),
    of_autoparallel("llama", 32, "8x8", "ilp"),
    of_autoparallel("llama", 32, "8x8", "approx"),
    of_autoparallel("deepseek", 6, "4x64", "approx", WRITTEN),
    of_autoparallel("deepseek", 6, "4x64", "ilp", WRITTEN),
)


def rows(
    races: Iterable[Race],
    checkouts: Mapping[str, Path],
    python: str,
    limit: float,
    known: Mapping[tuple[str, ...], Row],
) -> Iterator[Row]:
    """A row for each race that is known, or whose rival is there; ours runs once for each model."""
    done: dict[str, Measured] = {}
    for race in races:
        where = checkouts.get(race.rival)
        row = known.get((race.rival, race.solver, race.model, race.devices))
        if row is not None:
            yield row
        elif where is not None:
            if race.ours not in done:
                command = [sys.executable, str(PROGRAMS.parent / "ours.py"), race.ours, str(where)]
                done[race.ours] = measured(command, ROOT, limit)
            program = [python, str(PROGRAMS / race.program), *race.arguments]
            yield row_of(race, measured(program, where, limit), done[race.ours])


def row_of(race: Race, theirs: Measured, ours: Measured) -> Row:
    """The row of two measured processes; of a side that failed, the remark says why."""
    remarks = [race.remark] if race.remark else []
    for name, side in (("it", theirs), ("ours", ours)):
        if side.why:
            remarks.append(f"{name} failed: {side.why}")
    expected = race.step is not None and not theirs.why
    rival_step = theirs.number(race.step) if expected and race.step else None
    return Row(
        rival=race.rival,
        solver=race.solver,
        model=race.model,
        devices=race.devices,
        rival_s=None if theirs.why else theirs.seconds,
        rival_memory=theirs.memory,
        rival_step_s=rival_step,
        ours_s=None if ours.why else ours.seconds,
        ours_memory=ours.memory,
        ours_step_s=None if ours.why else ours.number("STEP"),
        remark="; ".join(remarks),
    )


def rows_of_highs(meshes: Iterable[str], model: str, limit: float) -> Iterator[Row]:
    """HiGHS on our own tables, as `benchmarks/search.py` races it."""
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "benchmarks" / "search.py"),
            *("--json", "--no-curves", "--rivals", "highs", "--time-limit", str(limit)),
            *("--only", model, "--meshes", *meshes),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for race in json.loads(done.stdout)["rows"]:
        yield Row(
            rival="highs",
            solver="integer program",
            model=race["model"],
            devices=race["mesh"],
            rival_s=race["rival_s"],
            rival_memory=None,
            rival_step_s=race["rival_cost"],
            ours_s=race["ours_s"],
            ours_memory=None,
            ours_step_s=race["ours_cost"],
            remark=race["note"],
        )
