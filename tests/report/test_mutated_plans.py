"""Plan files with values changed, removed, renamed and repeated at random: a page, a text, a
configuration, or one sentence.
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from report_models import MEGATRON, planned

from autopar.errors import AutoparError
from autopar.integrations.convert import TARGETS, convert
from autopar.plan import Plan
from autopar.report.explain.explanation import Explained
from autopar.report.page import Compared, Contents, page
from autopar.report.tables import show

MUTANTS = 150
WORDS = (
    "",
    "x",
    "S0",
    "S9 S9",
    "S1/3",
    "P",
    "R",
    "\x1b[2J",
    "</script>",
    "\ud800",
    "1f1b",
    "interleaved",
    "a\nb",
)
VALUES = (0, -1, 2**31, 2**62, 1e300, -1e300, 0.0, [], {}, None, True, [[]], {"a": 1}, *WORDS)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something lies in a file."""
    if path:
        yield path
    inside: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        inside = value.items()
    elif isinstance(value, list):
        inside = enumerate(value)
    for key, inner in inside:
        yield from places(inner, (*path, key))


def mutated(text: str, chance: random.Random) -> str:
    data = json.loads(text)
    for _ in range(chance.choice((1, 1, 2))):
        *path, key = chance.choice(
            [
                p
                for p in places(data)
                if chance.random() < 0.3 or p[0] not in ("operators", "redistributions")
            ]
        )
        held = data
        for part in path:
            held = held[part]
        match chance.randrange(4):
            case 0 | 1:
                held[key] = chance.choice(VALUES)
            case 2:
                del held[key]
            case 3 if isinstance(held, dict):
                held[chance.choice(("a\nb", "q/../0.", "x" * 300, f"{key}1"))] = held.pop(key)
            case _:
                held.insert(0, held[key])
    return json.dumps(data)


def explained(plan: Plan, wanted: str | None) -> None:
    show(Explained.of_file(plan, wanted).parts(), io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))


USES: dict[str, Callable[[Plan], object]] = {
    "page": lambda plan: page(Contents.of(plan, compared=Compared(other=plan))).encode(),
    "all": lambda plan: explained(plan, None),
    "each": lambda plan: explained(plan, "*"),
    **{
        f"to {target}": lambda plan, to=target: convert(plan, to).text.encode()
        for target in TARGETS
    },  # type: ignore[misc]
}


@pytest.fixture(scope="module")
def texts() -> list[str]:
    stages = planned(
        layers=4,
        mesh=(2,),
        scheme="data",
        stages=2,
        micro_batches=4,
        schedule="1f1b",
        recompute="none",
        zero=1,
    )
    return [stages.plan.to_json(), planned(pins=MEGATRON).plan.to_json()]


@pytest.mark.parametrize("seed", [0, 1])
def test_nothing_but_answers_and_sentences(texts: list[str], tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    read = 0
    path = tmp_path / "plan.json"
    for number in range(MUTANTS):
        path.write_text(mutated(texts[number % 2], chance))
        try:
            plan = Plan.load(path)
        except AutoparError:
            continue
        read += 1
        for use in USES.values():
            try:
                use(plan)
            except AutoparError as error:
                assert str(error)
    assert read > MUTANTS // 10
