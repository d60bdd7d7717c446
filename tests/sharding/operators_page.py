"""Writes docs/operators.md from the tables of rules and from what proved them: `python -m
tests.sharding.operators_page`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autopar.sharding.notation import COMMUNICATION, parse_rule
from autopar.sharding.rules import RULES, Entry

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "operators.md"
INSIDE = {
    "dispatch": "all-to-all of rows to where they are needed",
    "halo": "boundary rows between neighbours",
    "once": "all-to-all of rows, once to each place, axis by axis",
    "normalize": "all-reduce of the rows' maxima and sums",
    "prefix": "all-gather of the totals",
    "ring": "keys and values sent around the axis",
    "statistics": "all-reduce of sums",
    "vocabulary": "all-reduce of the rows' maxima and sums",
}
"""What an operator issues inside itself, by the word of its rule."""

HEAD = """# Operators

Written by `make operators` from the tables in `autopar/sharding/rules/` and the results in
`docs/proof-aten.json` and `docs/proof-onnx.json` (`make prove` writes those).

A rule is one line of factors: inputs `->` outputs `|` what splitting a factor leaves behind or
needs. `!x` stays whole, `+x` is an addend that is given once, `(a b)` is a compound of which the
outer part can be split, `*` is any number of leading dims. "e.g." stands before the rule of one
sample where the line depends on the call.

- **Splits**: the factors that can be split over a mesh axis; every operator can also be computed
  whole on all devices.
- **Partial**: the inputs (counted from 0) in which a sum may still be outstanding, which then is in
  the output.
- **Inside**: the communication that a split needs inside the operator.
- **Proof**: samples / strategies (of which split something), each executed shard by shard and
  compared with the whole, values and gradients.
"""


def read(name: str) -> dict[str, Any]:
    """One of the result files."""
    document: dict[str, Any] = json.loads((DOCS / name).read_text(encoding="utf-8"))
    return document


def _splits(text: str) -> str:
    """The factors that may be split: reduced ones with what they leave."""
    pattern = parse_rule(text)
    reductions = {
        name: meaning
        for names, meaning in pattern.clauses
        for name in names[:1]
        if meaning in ("sum", "mean", "max", "min")
    }
    names = dict.fromkeys(
        n
        for dims in (*pattern.inputs, *pattern.outputs)
        for dim in dims
        for n in dim
        if not n.isdigit()
    )
    words = [
        name if name not in reductions else f"{name} ({reductions[name]})"
        for name in names
        if name not in pattern.whole
    ]
    return ", ".join("leading dims" if word == "*" else word for word in words) or "-"


def _inside(text: str) -> str:
    words: dict[str, list[str]] = {}
    for names, meaning in parse_rule(text).clauses:
        if meaning in COMMUNICATION:
            words.setdefault(meaning, []).append(" + ".join(names))
    return "; ".join(f"{', '.join(names)}: {INSIDE[word]}" for word, names in words.items()) or "-"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _row(kind: str, entry: Entry, row: Mapping[str, Any] | None) -> str:
    fixed = isinstance(entry.rule, str)
    text = entry.rule if isinstance(entry.rule, str) else (row or {}).get("rule", "")
    example = f"e.g. `{text}`" if text else "depends on the call"
    rule = f"`{text}`" if fixed else example
    told = ", ".join("+".join(map(str, group)) for group in entry.linear) or "-"
    partial = told if entry.linear_of is None else "depends on the call"
    proof = f"{row['samples']} / {row['strategies']} ({row['split']})" if row else "-"
    splits, inside = (_splits(text), _inside(text)) if text else ("-", "-")
    return f"| `{kind}` | {_cell(rule)} | {splits} | {partial} | {inside} | {proof} |"


def _table(prefix: str, rows: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| operator | rule | splits | partial | inside | proof |", "|---|---|---|---|---|---|"]
    return lines + [
        _row(kind, RULES[kind], rows.get(kind)) for kind in sorted(RULES) if re.match(prefix, kind)
    ]


def page() -> str:
    """The whole page."""
    aten = read("proof-aten.json")
    onnx = read("proof-onnx.json")
    nodes = read("onnx-node-tests.json")
    ranks = onnx["two_ranks"]
    totals = aten["totals"]
    numbers = [
        "| proof | operators | samples | strategies | of them split | failures |",
        "|---|---|---|---|---|---|",
        f"| torch {aten['torch']}: its own operator samples and hand-written ones | "
        f"{totals['kinds']} | {totals['samples']} "
        f"| {totals['strategies']} | {totals['split']} | {totals['failures']} |",
        f"| onnx {onnx['onnx']}: its node tests, as they are and grown | {onnx['kinds']} | "
        f"{onnx['samples']} "
        f"| {onnx['strategies']} | {onnx['split']} | {onnx['failures']} |",
        "",
        f"Of onnx's {nodes['tests']} node tests, {nodes['counted']} are counted; {nodes['right']} "
        f"({nodes['share']:.1%}) give the "
        f"recorded numbers on one device. {ranks['splittable']} can be split over two ranks; there "
        f"{ranks['right']} "
        f"({ranks['share']:.1%}) are right.",
    ]
    left = [f"- {why}: {count} tests left out" for why, count in sorted(nodes["left_out"].items())]
    wrong: dict[str, list[str]] = {}
    for name, why in sorted({**nodes["wrong"], **ranks["wrong"]}.items()):
        wrong.setdefault(why, []).append(name)
    left += [
        f"- {why}: {', '.join(f'`{name}`' for name in names)}"
        for why, names in sorted(wrong.items())
    ]
    others = sorted(kind for kind in RULES if not kind.startswith("aten."))
    parts = [
        HEAD,
        "\n".join(numbers),
        "## Torch",
        "\n".join(_table(r"aten\.", aten["kinds"])),
        "## Others",
        "\n".join(_table("|".join(map(re.escape, others)) or "$^", {})),
        "## Node tests that are left out or differ",
        "\n".join(left),
        "## Node tests that cannot be split over two ranks",
        "Their names stand in `docs/proof-onnx.json`.",
        "\n".join(
            f"- {why}: {count} tests" for why, count in sorted(ranks["not_splittable"].items())
        ),
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
