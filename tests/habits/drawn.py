"""Habits drawn from a seed: modules and scripts composed at random, judged by one device.

    python -m tests.habits.drawn --draws 500 --seed 1
    python -m tests.habits.drawn --seed 1 --only 17

Each draw is a module, a script that trains it and a plan. It is right, or refused on every rank in
words. The source of all else is printed, with the arguments that draw it again.
"""

from __future__ import annotations

import argparse
import linecache
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn

import autopar
from autopar.errors import AutoparError, RunError
from autopar.plan import Plan
from autopar.runtime.launch import run_ranks
from tests.habits.drawn_modules import module_text
from tests.habits.drawn_scripts import script_text
from tests.habits.workshop import (
    PLANS,
    Ended,
    Gpt,
    Habit,
    Workshop,
    ended,
    judged,
    on_rank,
    verdict,
)

KINDS = ("data", "data, micro-batches", "zero3", "megatron", "1f1b", "search")
BARRED = {
    "BatchNorm": ("data, micro-batches", "1f1b"),
    "Dropout(0.2)": ("1f1b",),
    "LSTMCell": ("megatron",),
    "GRUCell": ("megatron",),
}
"""Plans that are refused whatever else a module has, by what is in its source."""
MOST_REFUSED = 0.25
"""The part of all draws that may be refused; with more of them little is tried."""
UNSTABLE = "unstable: on one device rounding alone changes it"
"""The verdict on a script that has steps in the direction of nothing but rounding."""
TOGETHER = 4
"""Draws that the same ranks run, one after the other."""
SECONDS = 300.0
HEAD = """from contextlib import nullcontext
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

V, W, B, S = 12, 4, 8, 4
"""
BATCH = """
def batch(number, size=B, sequence=S):
    draw = torch.Generator().manual_seed(number + 1)
    tokens = torch.randint(V, (size, sequence + 1), generator=draw)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """A composed module and script, and the kind of plan that it runs under."""

    seed: int
    number: int
    plan: str
    text: str

    def habit(self) -> Habit:
        """The script, of a module whose source is found as that of a file."""
        name = f"drawn_{self.seed}_{self.number}"
        module = types.ModuleType(name)
        module.__file__ = f"{name}.py"
        sys.modules[name] = module
        lines = self.text.splitlines(keepends=True)
        linecache.cache[module.__file__] = (len(self.text), None, lines, module.__file__)
        exec(compile(self.text, module.__file__, "exec"), module.__dict__)
        script: Habit = module.script
        return script


def drawn(seed: int, number: int) -> Draw:
    """The draw of this number; equal for equal numbers, everywhere."""
    random = Random(f"{seed} {number}")
    module = module_text(random)
    barred = {kind for words, some in BARRED.items() if words in module for kind in some}
    kinds = [kind for kind in KINDS if kind not in barred]
    plan = kinds[number % len(kinds)]
    text = HEAD + module + "\n" + BATCH + "\n" + script_text(random)
    return Draw(seed=seed, number=number, plan=plan, text=text)


class Planned(Exception):
    """A script that has come to its plan."""


class Prepared(Workshop):
    """A workshop whose plan is made once, before its ranks are forked.

    Without the proof at import and the check of the first step, a fault is seen where it begins.
    Dropout draws what one device would draw.
    """

    plan: Plan | None = None

    def planned(self, model: nn.Module, *example: Any, **options: Any) -> Any:
        """The model under the plan that is there; without one it is made, and the script ends."""
        if self.plan is None:
            wanted = {"devices": 2, "cluster": "local-cpu", "mode": "train", **(self.options or {})}
            self.plan = autopar.plan(model, example, proof=False, **wanted)
            raise Planned
        module = autopar.parallelize(model, self.plan, example, check=False, exact_random=True)
        self.made.append(module)
        return module


class Nudged(Workshop):
    """One device whose weights are off by a rounding."""

    def model(self, kind: Callable[..., nn.Module] = Gpt, **options: Any) -> Any:
        """A model whose weights differ from those of others by 1e-15 of themselves at most."""
        module = super().model(kind, **options)
        draw = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for value in module.parameters():
                noise = torch.rand(value.shape, generator=draw, dtype=value.dtype)
                value.mul_(1 + 1e-15 * (2 * noise - 1))
        return module


def prepared(draw: Draw) -> tuple[Prepared, str]:
    """The workshop of a draw with its plan, or why there is none."""
    workshop = Prepared(PLANS[draw.plan])
    try:
        draw.habit()(workshop)
    except Planned:
        return workshop, ""
    except AutoparError as error:
        return workshop, f"refused: {type(error).__name__}: {str(error).splitlines()[0]}"
    except Exception as error:
        return workshop, f"loud: {type(error).__name__}: {error}"
    raise AssertionError("a script that plans nothing")


def _on_rank(runs: Sequence[tuple[Habit, Workshop]]) -> list[Ended]:
    """Run several on one rank."""
    return [on_rank(habit, workshop) for habit, workshop in runs]


def verdicts(draws: Sequence[Draw]) -> list[str]:
    """The outcome of each draw; one that ends the ranks of all is tried on ranks of its own."""
    told = [""] * len(draws)
    runs: dict[int, tuple[Habit, Workshop]] = {}
    wanted = {}
    for number, draw in enumerate(draws):
        habit = draw.habit()
        wanted[number] = ended(habit, Workshop())
        if said := wanted[number].refused or wanted[number].loud:
            told[number] = f"broken: on one device {said}"
            continue
        workshop, told[number] = prepared(draw)
        if not told[number]:
            runs[number] = habit, workshop
    try:
        ranks = run_ranks(_on_rank, 2, list(runs.values()), timeout=SECONDS)
    except RunError:
        for number in runs:
            told[number] = verdict(runs[number][0], PLANS[draws[number].plan])
        return told
    for place, number in enumerate(runs):
        told[number] = judged(wanted[number], [ends[place] for ends in ranks])
        if told[number].startswith("WRONG"):
            nudged = judged(wanted[number], [ended(runs[number][0], Nudged())])
            told[number] = UNSTABLE if nudged != "right" else told[number]
    return told


def reason(told: str) -> str:
    """A refusal without names and numbers, by which refusals are counted."""
    said = re.sub(r"'[^']*'|\"[^\"]*\"", "NAME", told.removeprefix("refused: "))
    return re.sub(r"\d[\d.e+-]*", "N", said)[:140]


def is_fault(told: str) -> bool:
    """Whether a verdict is neither right nor a refusal in words."""
    return told not in ("right", UNSTABLE) and not told.startswith("refused: ")


def told_of(counted: Counter[str]) -> str:
    """A summary of counted verdicts and reasons."""
    return "\n".join(f"{count:5}  {text}" for text, count in counted.most_common())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run draws and print what came out; 1 if one is a fault, or too many are refused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draws", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one draw, which is printed")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    numbers = range(given.draws) if given.only is None else [given.only]
    counted: Counter[str] = Counter()
    faults = 0
    for begin in range(0, len(numbers), TOGETHER):
        draws = [drawn(given.seed, number) for number in numbers[begin : begin + TOGETHER]]
        for draw, told in zip(draws, verdicts(draws), strict=True):
            counted[told if told == "right" else reason(told)] += 1
            faults += is_fault(told)
            if is_fault(told) or given.only is not None:
                print(draw.text)
            if told != "right":
                print(f"--seed {draw.seed} --only {draw.number} | {draw.plan} | {told}", flush=True)
    refused = sum(counted.values()) - counted["right"] - counted[reason(UNSTABLE)] - faults
    print(f"{told_of(counted)}\n{len(numbers)} draws, {refused} refused, {faults} faults")
    return 1 if faults or refused > MOST_REFUSED * len(numbers) else 0


if __name__ == "__main__":
    sys.exit(main())
