"""Saves killed at a random moment, and the cost of saves for the steps during them."""

from __future__ import annotations

import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

import autopar
from autopar.api import plan_loaded
from autopar.errors import AutoparError
from autopar.frontends.load import ModelOptions, load_model
from autopar.model import LoadedModel
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from autopar.runtime.training.checkpoint_storage import SafeReader
from autopar.runtime.training.latest import find_checkpoint
from autopar.runtime.training.manifest import read_manifest
from benchmarks.running.gpt2 import Shape, batch
from benchmarks.running.models import model

from .disturbing import Process, ended
from .trainings import Life

ENDLESS = 100_000
WITHIN = 0.04
"""Seconds after a step within which its save is killed."""
TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Kills:
    """Kills while a checkpoint was saved after every step.

    Those inside a save are counted apart; `error` is empty where none came up.
    """

    kills: int
    inside: int
    wrong: str


def killed_saves(wanted: int, seed: int = 0) -> Kills:
    """One training, killed until `wanted` kills came inside a save.

    Each life continues from the one before.
    """
    chance = random.Random(seed)
    inside = 0
    step = 0
    with tempfile.TemporaryDirectory() as place:
        saved = Path(place) / "saved"
        life = Life(
            model="dense", scheme="zero3", ranks=2, folder=place, steps=ENDLESS, save_every=1
        )
        for number in range(TRIES * wanted):
            process = Process(
                replace(life, wait=None if number % 2 else 60.0)
            )  # at once, and beside the steps
            if not process.made(chance.randrange(1, 4)):
                return Kills(
                    kills=number, inside=inside, wrong=f"no step was made: {process.said[:300]}"
                )
            time.sleep(chance.random() * WITHIN)
            pids = process.pids
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            process.wait()
            if not ended(pids):
                return Kills(kills=number, inside=inside, wrong="ranks were left behind")
            inside += bool(list(saved.glob(".saving-*")))
            before = step
            step, wrong = _latest(saved)
            if wrong or step < before:
                return Kills(
                    kills=number,
                    inside=inside,
                    wrong=wrong or f"the latest is of step {step}, and was of step {before}",
                )
            if inside == wanted:
                break
    return Kills(kills=number + 1, inside=inside, wrong="")


def _latest(folder: Path) -> tuple[int, str]:
    """The step of the latest checkpoint, every bit of which is looked at."""
    try:
        path = find_checkpoint(folder)
        if path is None:
            return 0, ""
        manifest, _ = read_manifest(path)
        SafeReader(path, manifest).require_whole()
    except AutoparError as error:
        return 0, str(error)
    return manifest.step, ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The cost of a save for the steps during it.

    `ratio`: to the same number of steps without a save, the median of pairs. `computed`: the same
    for the computing seconds of the training thread, which other programs hardly change.
    `megabytes`: of the save.
    """

    ranks: int
    pairs: int
    steps: int
    megabytes: float
    step_s: float
    copy_s: float
    ratio: float
    spread: float
    computed: float


def cost_of(shape: Shape, ranks: int, pairs: int) -> Cost:
    """The cost of an asynchronous save.

    For the steps until it is through, and of the copy before them.
    """
    loaded = load_model(model(shape), ModelOptions(train=True), batch(shape, 0))
    plan = plan_loaded(
        loaded, devices=ranks, cluster="local-cpu", scheme="zero3" if ranks > 1 else None
    ).plan
    with tempfile.TemporaryDirectory() as place:
        made: Cost = run_ranks(_cost, ranks, loaded, plan, place, shape, pairs, timeout=3000.0)[0]
    return made


def _cost(model: LoadedModel, plan: Plan, place: str, shape: Shape, pairs: int) -> Cost:
    module = autopar.parallelize(model, plan)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4)
    inputs = batch(shape, 0)
    for _ in range(3):
        module.train_step(inputs, optimizer)
    steps = 0
    copies = []
    times = []
    alone = []
    autopar.save(module, optimizer, place, step=0, keep=1)
    saving = autopar.save(module, optimizer, place, step=0, keep=1, wait=600.0)
    while not _everywhere(saving.done):  # so many steps that a save is through within them
        module.train_step(inputs, optimizer)
        steps += 1
    for number in range(pairs):
        pair = {}
        own = {}
        for saves in (True, False) if number % 2 else (False, True):
            _together()
            began = time.perf_counter()
            computed = time.thread_time()
            if saves:
                saving = autopar.save(module, optimizer, place, step=0, keep=1, wait=600.0)
                copies.append(time.perf_counter() - began)
            for _ in range(steps):
                module.train_step(inputs, optimizer)
            pair[saves] = time.perf_counter() - began
            own[saves] = time.thread_time() - computed
            saving.wait()
            _together()
        times.append(pair)
        alone.append(own)
    ratios = sorted(pair[True] / pair[False] for pair in times)
    size = sum(path.stat().st_size for path in Path(place).glob("step-*/*.safetensors"))
    return Cost(
        ranks=plan.devices,
        pairs=pairs,
        steps=steps,
        megabytes=size / 1e6,
        step_s=statistics.median(pair[False] for pair in times) / steps,
        copy_s=statistics.median(copies),
        ratio=statistics.median(ratios),
        spread=ratios[len(ratios) * 3 // 4] - ratios[len(ratios) // 4],
        computed=statistics.median(own[True] / own[False] for own in alone),
    )


def _everywhere(done: bool) -> bool:
    if not dist.is_initialized():
        return done
    flag = torch.tensor([int(done)])
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()
