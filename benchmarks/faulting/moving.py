"""Trainings moved between plans and rank counts, and a long training compared with one device."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

import autopar
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.training.checkpoint_storage import SafeReader
from autopar.runtime.training.latest import find_checkpoint
from autopar.runtime.training.manifest import Manifest, read_manifest

from .disturbing import Process, ended
from .trainings import Life, curve, loaded, plan_of

CLOSE = 1e-5
"""The largest relative difference of losses on other plans."""
PART = 3
"""Steps between two moves."""
LONGEST = 600.0
"""Seconds that a part may take."""
CHAINS: dict[str, tuple[str, tuple[tuple[str, int], ...]]] = {
    "zero3 - megatron": (
        "dense",
        (("zero3", 8), ("megatron", 6), ("zero3", 4), ("megatron", 2), ("found", 1), ("zero3", 8)),
    ),
    "megatron - data": (
        "dense",
        (("megatron", 8), ("data", 6), ("megatron", 4), ("data", 2), ("found", 1), ("megatron", 8)),
    ),
    "stages - zero1": (
        "dense",
        (("3d", 8), ("zero1", 6), ("1f1b", 4), ("zero1", 2), ("found", 1), ("3d", 8)),
    ),
    "experts - zero3": (
        "experts",
        (
            ("experts split", 8),
            ("zero3", 6),
            ("experts split", 4),
            ("zero3", 2),
            ("found", 1),
            ("experts split", 8),
        ),
    ),
    "experts - data": (
        "experts",
        (
            ("data", 8),
            ("experts split", 6),
            ("data", 4),
            ("experts split", 2),
            ("found", 1),
            ("data", 8),
        ),
    ),
}
"""Two kinds of plan in turn, on 8, 6, 4, 2, 1 and again 8 ranks."""
SHORT: tuple[str, tuple[tuple[str, int], ...]] = (
    "experts",
    (("experts split", 4), ("zero3", 2), ("found", 1), ("experts split", 4)),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The outcome of a chain: an error (empty: none) and the largest difference of its losses."""

    chain: str
    wrong: str
    difference: float


def whole(path: Path) -> tuple[Manifest, dict[str, bytes]]:
    """A checkpoint, and the bits of each of its tensors, put together from the pieces."""
    manifest, _ = read_manifest(path)
    reader = SafeReader(path, manifest)
    tensors = {}
    reader.require_whole()
    for name, entry in manifest.tensors.items():
        value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for piece in entry.pieces:
            value[
                tuple(
                    slice(at, at + size)
                    for at, size in zip(piece.offsets, piece.shape, strict=True)
                )
            ] = reader.read(piece)
        tensors[name] = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return manifest, tensors


def saved_again(life: Life, other: str) -> None:
    """Load a checkpoint under a plan and save it elsewhere, on every rank, with no step between."""
    module = autopar.parallelize(loaded(life.model), plan_of(life.model, life.scheme, life.ranks))
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    resumed = autopar.resume(module, optimizer, life.folder)
    assert resumed is not None
    autopar.save(module, optimizer, other, step=resumed.step)


def differing(first: Path, second: Path) -> list[str]:
    """Names of tensors and numbers that two checkpoints do not have alike."""
    manifest, tensors = whole(first)
    other_manifest, other_tensors = whole(second)
    pairs = ((tensors, other_tensors), (manifest.scalars, other_manifest.scalars))
    return [
        name
        for one, other in pairs
        for name in one.keys() | other.keys()
        if one.get(name) != other.get(name)
    ]


def moved(name: str, model: str, chain: Sequence[tuple[str, int]]) -> Moved:
    """One chain: at every move the bits are compared, and in the end losses and samples."""
    for scheme, ranks in (*chain, ("found", 1)):
        plan_of(model, scheme, ranks)  # before ranks are forked
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number, (scheme, ranks) in enumerate(chain, 1):
            life = Life(
                model=model,
                scheme=scheme,
                ranks=ranks,
                folder=str(folder / "run"),
                steps=PART * number,
                save_every=PART,
            )
            if number > 1:
                before = find_checkpoint(folder / "run" / "saved")
                again = Life(
                    model=model,
                    scheme=scheme,
                    ranks=ranks,
                    folder=str(folder / "run" / "saved"),
                    steps=0,
                )
                run_ranks(saved_again, ranks, again, str(folder / str(number)), timeout=LONGEST)
                after = find_checkpoint(folder / str(number))
                assert before is not None and after is not None
                if names := differing(before, after):
                    return Moved(
                        chain=name,
                        wrong=f"to {scheme} on {ranks} ranks: {len(names)} differ: {names[:3]}",
                        difference=0.0,
                    )
            process = Process(life)
            if (code := process.wait(LONGEST)) != 0:
                return Moved(
                    chain=name,
                    wrong=f"{scheme} on {ranks} ranks ended in {code}: {process.said[:300]}",
                    difference=0.0,
                )
        alone = Process(
            Life(
                model=model,
                scheme="found",
                ranks=1,
                folder=str(folder / "alone"),
                steps=PART * len(chain),
            )
        )
        alone.wait(LONGEST)
        return compared(name, curve(folder / "alone"), curve(folder / "run"))


def compared(
    name: str,
    wanted: dict[int, tuple[float, list[int]]],
    states: dict[int, tuple[float, list[int]]],
) -> Moved:
    if [(step, states[step][1]) for step in sorted(states)] != [
        (step, wanted[step][1]) for step in sorted(wanted)
    ]:
        return Moved(chain=name, wrong="the samples are others", difference=0.0)
    difference = max(abs(states[step][0] / wanted[step][0] - 1) for step in wanted)
    wrong = "" if difference <= CLOSE else f"losses differ by {difference:.1g}"
    return Moved(chain=name, wrong=wrong, difference=difference)


@dataclass(frozen=True, slots=True, kw_only=True)
class Long:
    """A long training with kills, compared with one device.

    Relative differences of losses, and of means over 50 steps.

    `equal`: whether each step's loss and samples equal, bit for bit, those of the same ranks
    without kills.
    """

    model: str
    steps: int
    ranks: int
    plan: str
    kills: int
    wrong: str
    equal: bool
    largest: float
    of_means: float
    first: float
    last: float


def long(model: str, steps: int, ranks: int, kills: int, seed: int = 0) -> Long:
    """The search's plan, killed at random steps."""
    chance = random.Random(seed)
    window = 50
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        life = Life(
            model=model,
            scheme="found",
            ranks=ranks,
            folder=str(folder / "run"),
            steps=steps,
            save_every=25,
            wait=60.0,
        )
        wrong = ""
        for at in sorted(chance.sample(range(steps // 10, steps * 9 // 10), kills)):
            process = Process(life)
            if not process.reached(at, seconds=3600.0):
                wrong = wrong or f"step {at} was not reached: {process.said[:200]}"
                break
            pids = process.pids
            os.kill(chance.choice(pids), signal.SIGKILL)
            process.wait()
            wrong = wrong or ("" if ended(pids) else "ranks were left behind")
        last = Process(life)
        code = last.wait(3600.0)
        wrong = wrong or ("" if code == 0 else f"the last life ended in {code}: {last.said[:200]}")
        quiet = replace(life, folder=str(folder / "quiet"))
        for other in (
            quiet,
            replace(quiet, ranks=1, folder=str(folder / "alone"), save_every=steps),
        ):
            Process(other).wait(3600.0)
        killed, unkilled, wanted = (curve(folder / name) for name in ("run", "quiet", "alone"))
    if sorted(killed) != list(range(steps)) or any(
        killed[step][1] != wanted[step][1] for step in wanted
    ):
        wrong = wrong or "steps or samples are others"
    wrong = wrong or (
        "" if killed == unkilled else "steps are not those of the same ranks without kills"
    )
    pairs = [(killed[step][0], wanted[step][0]) for step in sorted(wanted) if step in killed]
    means = [
        abs(
            statistics.fmean(one for one, _ in pairs[at : at + window])
            / statistics.fmean(two for _, two in pairs[at : at + window])
            - 1
        )
        for at in range(0, len(pairs), window)
    ]
    return Long(
        model=model,
        steps=steps,
        ranks=ranks,
        plan=_described(plan_of(model, "found", ranks)),
        kills=kills,
        wrong=wrong,
        equal=killed == unkilled,
        largest=max(abs(one / two - 1) for one, two in pairs),
        of_means=max(means),
        first=pairs[0][1],
        last=pairs[-1][1],
    )


def _described(plan: Plan) -> str:
    """Stages and mesh of a plan."""
    return f"{len(plan.stages)} stages of {plan.mesh_}" if plan.stages else str(plan.mesh_)
