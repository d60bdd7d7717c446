"""The page of the types of transformers that run on ranks, made of the tables of the tests.

    python -m tests.end_to_end.types_page

writes docs/models.md. A test holds the page to the tables, and other tests run what they say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.end_to_end.further_types import CASES, UNREAD
from tests.end_to_end.small_pictures import PICTURED
from tests.end_to_end.small_types import REFUSED, TYPES
from tests.end_to_end.test_configured_types import PLANS
from tests.frontends.huggingface.test_inputs import BATCHES, SPLIT
from tests.frontends.huggingface.test_inputs import PICTURED as BY_FILE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
HEAD = """# Types of transformers

`hf:config.json` takes any type that transformers has a module for (`autopar models` lists them).
Small versions of {count} types run on two or four ranks: outputs, losses, gradients and updated
weights are those of one device. `tests/end_to_end/` and `tests/frontends/huggingface/` have a test
for every cell. **equal**: to the check's tolerance. **refused**: with the reason. An empty cell was
not run. `python -m tests.end_to_end.types_page` makes this page.

"""
READ = """
Read alone, with their batches and graphs: {kinds}.
"""
REFUSALS = """
Types that are not read are refused with the place in their code:

| type | says |
|---|---|
"""


def runs() -> Mapping[str, Mapping[str, str]]:
    """The outcome of each plan of each type that tests run."""
    made: dict[str, dict[str, str]] = {}
    for kind in TYPES:
        made[kind] = {plan: "refused" if (kind, plan) in REFUSED else "equal" for plan in PLANS}
    for kind, plan in CASES:
        made.setdefault(kind, {})[plan] = "equal"
    for kind in PICTURED:
        made.setdefault(f"{kind}, with images", {}).update(dict.fromkeys(PLANS, "equal"))
    for kind in BY_FILE:
        made.setdefault(f"{kind}, with images", {})["zero3"] = "equal"
    for kind, (scheme, _) in SPLIT.items():
        made.setdefault(kind, {})[scheme or "searched"] = "equal"
    return made


def page() -> str:
    """The text of the page."""
    made = runs()
    plans = [*PLANS, *sorted({plan for row in made.values() for plan in row} - set(PLANS))]
    kinds = {kind.partition(",")[0] for kind in made}
    head = HEAD.format(count=len(kinds))
    read = sorted({kind for kind, _ in BATCHES} - kinds)
    behind = READ.format(kinds=", ".join(read)).rstrip("\n")
    return head + "\n".join([*_table(made, plans), behind, REFUSALS.rstrip("\n"), *_refusals(), ""])


def _table(made: Mapping[str, Mapping[str, str]], plans: list[str]) -> Iterator[str]:
    yield f"| type | {' | '.join(plans)} |"
    yield "|---" * (len(plans) + 1) + "|"
    for kind in sorted(made):
        yield f"| {kind} | {' | '.join(made[kind].get(plan, '') for plan in plans)} |"


def _refusals() -> Iterator[str]:
    for kind, (_, says) in sorted(UNREAD.items()):
        yield f"| {kind} | {says} |"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")
