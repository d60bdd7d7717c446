"""Trainings moved between plans and numbers of ranks, and a long training compared with one device."""

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
from autopar.runtime.training.manifest import Manifest, find_checkpoint, read_manifest
from autopar.runtime.training.storage import SafeReader

from .disturbing import Process, ended
from .trainings import Life, curve, loaded, plan_of

CLOSE = 1e-5
"""The largest relative difference of losses on other plans."""
PART = 3
"""Steps between two moves."""
LONGEST = 600.0
"""Seconds that a part may take."""
CHAINS: dict[str, tuple[str, tuple[tuple[str, int], ...]]] = {
    "zero3 - megatron": ("dense", (("zero3", 8), ("megatron", 6), ("zero3", 4), ("megatron", 2), ("found", 1), ("zero3", 8))),
    "megatron - data": ("dense", (("megatron", 8), ("data", 6), ("megatron", 4), ("data", 2), ("found", 1), ("megatron", 8))),
    "stages - zero1": ("dense", (("3d", 8), ("zero1", 6), ("1f1b", 4), ("zero1", 2), ("found", 1), ("3d", 8))),
    "experts - zero3": (
        "experts", (("experts split", 8), ("zero3", 6), ("experts split", 4), ("zero3", 2), ("found", 1), ("experts split", 8))
    ),
    "experts - data": ("experts", (("data", 8), ("experts split", 6), ("data", 4), ("experts split", 2), ("found", 1), ("data", 8))),
}  # fmt: skip
"""Two kinds of plan in turn, on 8, 6, 4, 2, 1 and again 8 ranks."""
SHORT: tuple[str, tuple[tuple[str, int], ...]] = "experts", (("experts split", 4), ("zero3", 2), ("found", 1), ("experts split", 4))


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """The error in a chain (empty: none), and the largest difference of its losses from one rank's."""

    chain: str
    wrong: str
    difference: float


def whole(path: Path) -> tuple[Manifest, dict[str, bytes]]:
    """A checkpoint, and the bits of each of its tensors, put together from the pieces."""
    manifest, _ = read_manifest(path)
    reader, found = SafeReader(path, manifest), {}
    reader.require_whole()
    for name, entry in manifest.tensors.items():
        value = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        for piece in entry.pieces:
            value[tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.shape, strict=True))] = reader.read(piece)
        found[name] = value.reshape(-1).view(torch.uint8).numpy().tobytes()
    return manifest, found


def saved_again(life: Life, other: str) -> None:
    """On a rank: a checkpoint is loaded under a plan and saved elsewhere, with nothing done between."""
    module = autopar.parallelize(loaded(life.model), plan_of(life.model, life.scheme, life.ranks))
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    found = autopar.resume(module, optimizer, life.folder)
    assert found is not None
    autopar.save(module, optimizer, other, step=found.step)


def differing(first: Path, second: Path) -> list[str]:
    """Names of tensors and numbers that two checkpoints do not have alike."""
    (one, values), (other, others) = whole(first), whole(second)
    names = [name for name in values.keys() | others.keys() if values.get(name) != others.get(name)]
    return names + [name for name in one.scalars.keys() | other.scalars.keys() if one.scalars.get(name) != other.scalars.get(name)]


def moved(name: str, model: str, chain: Sequence[tuple[str, int]]) -> Moved:
    """One chain: at every move the bits are compared, and in the end losses and samples."""
    for scheme, ranks in (*chain, ("found", 1)):
        plan_of(model, scheme, ranks)  # before ranks are forked
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        for number, (scheme, ranks) in enumerate(chain, 1):
            life = Life(model=model, scheme=scheme, ranks=ranks, folder=str(folder / "run"), steps=PART * number, save_every=PART)
            if number > 1:
                before = find_checkpoint(folder / "run" / "saved")
                again = Life(model=model, scheme=scheme, ranks=ranks, folder=str(folder / "run" / "saved"), steps=0)
                run_ranks(saved_again, ranks, again, str(folder / str(number)), timeout=LONGEST)
                after = find_checkpoint(folder / str(number))
                assert before is not None and after is not None
                if names := differing(before, after):
                    return Moved(chain=name, wrong=f"to {scheme} on {ranks} ranks: {len(names)} differ: {names[:3]}", difference=0.0)
            process = Process(life)
            if (code := process.wait(LONGEST)) != 0:
                return Moved(chain=name, wrong=f"{scheme} on {ranks} ranks ended in {code}: {process.said[:300]}", difference=0.0)
        alone = Process(Life(model=model, scheme="found", ranks=1, folder=str(folder / "alone"), steps=PART * len(chain)))
        alone.wait(LONGEST)
        return _compared(name, curve(folder / "alone"), curve(folder / "run"))


def _compared(name: str, wanted: dict[int, tuple[float, list[int]]], found: dict[int, tuple[float, list[int]]]) -> Moved:
    if [(step, found[step][1]) for step in sorted(found)] != [(step, wanted[step][1]) for step in sorted(wanted)]:
        return Moved(chain=name, wrong="the samples are others", difference=0.0)
    difference = max(abs(found[step][0] / wanted[step][0] - 1) for step in wanted)
    wrong = "" if difference <= CLOSE else f"losses differ by {difference:.1g}"
    return Moved(chain=name, wrong=wrong, difference=difference)


@dataclass(frozen=True, slots=True, kw_only=True)
class Long:
    """A long training with kills, compared with one device: relative differences of losses, and of means over 50 steps.

    `equal`: whether each step's loss and samples equal, bit for bit, those of the same ranks without kills.
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
    chance, window = random.Random(seed), 50
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        life = Life(model=model, scheme="found", ranks=ranks, folder=str(folder / "run"), steps=steps, save_every=25, wait=60.0)
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
        for other in (quiet, replace(quiet, ranks=1, folder=str(folder / "alone"), save_every=steps)):
            Process(other).wait(3600.0)
        found, unkilled, wanted = (curve(folder / name) for name in ("run", "quiet", "alone"))
    if sorted(found) != list(range(steps)) or any(found[step][1] != wanted[step][1] for step in wanted):
        wrong = wrong or "steps or samples are others"
    wrong = wrong or ("" if found == unkilled else "steps are not those of the same ranks without kills")
    pairs = [(found[step][0], wanted[step][0]) for step in sorted(wanted) if step in found]
    means = [
        abs(statistics.fmean(one for one, _ in pairs[at : at + window]) / statistics.fmean(two for _, two in pairs[at : at + window]) - 1)
        for at in range(0, len(pairs), window)
    ]
    return Long(
        model=model, steps=steps, ranks=ranks, plan=_described(plan_of(model, "found", ranks)), kills=kills, wrong=wrong,
        equal=found == unkilled,
        largest=max(abs(one / two - 1) for one, two in pairs), of_means=max(means), first=pairs[0][1], last=pairs[-1][1],
    )  # fmt: skip


def _described(plan: Plan) -> str:
    """Stages and mesh of a plan."""
    return f"{len(plan.stages)} stages of {plan.mesh_}" if plan.stages else str(plan.mesh_)
