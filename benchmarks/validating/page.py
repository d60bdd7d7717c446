"""The page of all groups: errors beside a null model and peers, what was seen, and what is open.

It is written beside the figures of the last one, in a JSON file, so that it can say which got
worse.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .scores import Group, Score
from .seen import READ, saw
from .training import BY_NEUTRAL

WORSE = 0.01
"""The difference of a figure from which it is told."""
FIGURES = ("mean_error", "memory_error", "oom_accuracy")
"""Figures that the file holds, and that are held to it within `WORSE`."""
TREND = 0.02
"""The slope of a residual for a doubling from which it is shown."""
INTRODUCTION = """# Errors on published runs

`python benchmarks/validation.py --data DIR --page docs/published-runs.md` writes this page. The
[cost model](cost-model.md#errors-against-published-runs) says what the rows are.

Runs are priced as plans, at most 120 of each group, evenly spaced. *Before* is the mean error in
the last version.

- *Null*: the error of a model that knows one rate, that of all other rows of the group.
- *Peer*: the error of the source's own model, on the same rows or as others state it.
- *Saw*: constants that were read off these machines or rows; the list below says which. A group
  with *without* in its name has the same rows without them. *Without its profile* they are
  priced by the habits of most frameworks, and by no constant that has seen them.
- *Stated*: the error of the rows that leave no fact open. *Open*: facts that rows do not state, and
  the number of those rows.
- *Trends*: the slope of log(predicted / measured) for each doubling, where it is above 2 %, all
  figures taken together.
"""


def figures_of(scores: Mapping[str, Score]) -> dict[str, dict[str, float]]:
    """The figures of each group that a page is held to."""
    return {
        name: {
            figure: round(value, 4)
            for figure in FIGURES
            if (value := getattr(score, figure)) is not None
        }
        for name, score in scores.items()
        if score.n or score.memory_n
    }


def worse(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A sentence for each figure that is worse than before, or whose group is gone."""
    told = [f"{name} is gone" for name in before if name not in now]
    for name, figures in now.items():
        for figure, value in figures.items():
            last = before.get(name, {}).get(figure)
            if last is None:
                continue
            loss = last - value if figure == "oom_accuracy" else value - last
            if loss > WORSE:
                what = figure.replace("_", " ")
                told.append(f"{name}: {what} {last:.1%} before, {value:.1%} now")
    return told


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The figures that differ by more than a point, better or worse."""
    return [
        f"{name}: {figure} {figures[figure]:.1%}, {now.get(name, {}).get(figure, float('nan')):.1%}"
        for name, figures in before.items()
        for figure in figures
        if not abs(now.get(name, {}).get(figure, float("inf")) - figures[figure]) <= WORSE
    ]


def write_page(path: Path, scored: Sequence[tuple[Group, Score, str]], left_out: str = "") -> None:
    """Write the page, and its figures beside it; a group comes with its peer's error in words.

    `left_out`: the tables of what is left out (`tables.py`).
    """
    beside = path.with_suffix(".json")
    before = json.loads(beside.read_text(encoding="utf-8")) if beside.exists() else {}
    now = figures_of({group.name: score for group, score, _ in scored})
    path.write_text(_page(scored, before, left_out), encoding="utf-8")
    beside.write_text(json.dumps(now, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _page(
    scored: Sequence[tuple[Group, Score, str]], before: Mapping[str, Any], left_out: str
) -> str:
    header = "group rows mean before largest bias null peer saw stated open trends fit memory"
    names = header.split()
    lines = [INTRODUCTION, f"| {' | '.join(names)} |", f"|{'---|' * len(names)}"]
    lines += [
        _row(group, score, peer, before.get(group.name, {}))
        for group, score, peer in scored
        if score.n
    ]
    lines += ["", *_without_profiles(scored)]
    lines += ["", "## Constants that saw what is scored", ""]
    lines += [
        f"- *{read.what}* (`{read.place}`): {', '.join(name.rstrip('*') for name in read.groups)}; "
        + ("scored without it, too." if read.apart else f"not scored without it: {read.reason}.")
        for read in READ
    ]
    lines += ["", left_out] if left_out else []
    lines += ["", "## Rows left out", ""]
    lines += [
        f"- {group.name}: {count}, {reason.partition(';')[0]}."
        for group, score, _ in scored
        for reason, count in score.left_out.items()
    ]
    lines += ["", "## Worse than in the last version", ""]
    now = figures_of({group.name: score for group, score, _ in scored})
    lines += [f"- {loss}." for loss in worse(before, now)] or ["Nothing."]
    return "\n".join(lines) + "\n"


def _without_profiles(scored: Sequence[tuple[Group, Score, str]]) -> list[str]:
    """The errors of runs with what was read of their framework and without it, by source."""
    errors = {group.name: score.mean_error for group, score, _ in scored}
    names = [name.removesuffix(BY_NEUTRAL) for name in errors if name.endswith(BY_NEUTRAL)]
    pairs = [(name, errors.get(name), errors[f"{name}{BY_NEUTRAL}"]) for name in names]
    means = [_mean([pair[place] for pair in pairs]) for place in (1, 2)]
    return [
        "## Runs without a profile",
        "",
        "| source | mean | without its profile |",
        "|---|---|---|",
        *(f"| {name} | {_percent(own)} | {_percent(error)} |" for name, own, error in pairs),
        f"| mean of the sources | {_percent(means[0])} | {_percent(means[1])} |",
    ]


def _mean(values: Sequence[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return sum(given) / len(given) if given else None


def _row(group: Group, score: Score, peer: str, before: Mapping[str, float]) -> str:
    facts = ", ".join(f"{fact} {count}" for fact, count in score.open_facts.items())
    trends = ", ".join(
        f"{name} {slope:+.0%}" for name, slope in score.trends.items() if abs(slope) > TREND
    )
    cells = (
        group.name,
        str(score.n),
        _percent(score.mean_error),
        _percent(before.get("mean_error")),
        _percent(score.max_error),
        _percent(score.bias, "+"),
        _percent(score.null_error),
        peer,
        saw(group.name),
        _percent(score.stated_error) if score.open_facts else "-",
        facts or "-",
        trends or "-",
        _percent(score.oom_accuracy),
        _percent(score.memory_error),
    )
    return f"| {' | '.join(cells)} |"


def _percent(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.1%}".replace("%", " %")
