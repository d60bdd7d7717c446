"""The page of all habits under all plans: `make habits`.

    python -m tests.habits.page build/habits.md

runs every habit under every plan, in tens of minutes, and writes what came out.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.habits.exceptions import EXCEPTIONS, exception_of
from tests.habits.table import HABITS
from tests.habits.workshop import PLANS, verdict

Verdicts = Mapping[tuple[str, str], str]
"""What came out, by habit and plan."""
HEAD = """# Habits of training scripts

What scripts do to modules, optimizers and gradients, under plans of {plans} kinds on two ranks,
beside one device in float64. **right**: values, losses and weights at the end are equal to 1e-7.
**refused**: every rank raises an error that says why. A letter is an exception, listed below.
`make habits` runs all of them; each is a test.

"""


def is_expected(habit: str, plan: str, told: str) -> bool:
    """Whether a verdict is right, a refusal, or one that the exceptions state."""
    if exception_of(habit, plan) is not None:
        return not told.startswith(("right", "broken"))
    return told == "right" or told.startswith("refused: ")


def written(verdicts: Verdicts) -> str:
    """The page of verdicts."""
    letters = {text: chr(ord("a") + number) for number, text in enumerate(EXCEPTIONS)}
    lines = [HEAD.format(plans=len(PLANS)) + f"| habit | {' | '.join(PLANS)} |"]
    lines.append("|---" * (len(PLANS) + 1) + "|")
    for habit in HABITS:
        cells = []
        for plan in PLANS:
            stated = exception_of(habit, plan)
            told = verdicts[habit, plan]
            if stated is not None:
                cells.append(letters[stated])
            else:
                cells.append("right" if told == "right" else "refused")
        lines.append(f"| {habit} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"- **{letter}**: {text}" for text, letter in letters.items()]
    return "\n".join(lines) + "\n"


def main(path: str) -> int:
    """Run everything and write the page; 1 if something is neither right nor refused."""
    torch.set_num_threads(1)
    verdicts: dict[tuple[str, str], str] = {}
    wrong = 0
    for plan, options in PLANS.items():
        for name, habit in HABITS.items():
            told = verdict(habit, options)
            verdicts[name, plan] = told
            if not is_expected(name, plan, told):
                wrong += 1
                print(f"{plan} | {name} | {told}", flush=True)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_text(written(verdicts), encoding="utf-8")
    print(f"{len(verdicts)} runs, {wrong} neither right nor refused; the page is {path}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
