"""The operators of a plan as a tree of modules with equal layers folded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.analysis.program.account import Account
from autopar.analysis.program.layer_names import folded_names
from autopar.analysis.program.strategy_words import phrase
from autopar.plan import Plan
from autopar.report.explain.operators import BARE
from autopar.report.tables import collective_text
from autopar.units import seconds_text

DEEPEST = 10
"""The most levels of the tree; the parts of longer names are joined."""
ROOM = 1_800_000
"""The most characters of the tree, roughly."""
ROW = 200
MODULE = 500
"""The characters of a row and of a module besides their texts."""
COLOURED = 10
"""The number of colours of the pictures."""
_TOKEN = re.compile(r"(?:\{[^}]*\}|[^/.{])+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Operators alike in `count` layers; `number`: in the order of the tree's rows.

    `colour`: the number of the strategy (the last colour is for all rare ones). `path`: the modules
    around the row. `members`: the operators.
    """

    number: int
    path: tuple[str, ...]
    members: tuple[str, ...]
    name: str
    count: int
    kind: str
    strategy: str
    colour: int
    more: str


@dataclass(slots=True, kw_only=True)
class Module:
    """A module with its operators and inner modules.

    `strategies`: the number of operators below it by colour.
    """

    name: str
    modules: dict[str, Module] = field(default_factory=dict)
    leaves: list[Leaf] = field(default_factory=list)
    strategies: Counter[int] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """The number of operators below."""
        return self.strategies.total()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """The root, its rows in order, the meanings of the colours, and the number of omitted rows."""

    root: Module
    leaves: tuple[Leaf, ...]
    colours: tuple[str, ...]
    left_out: int


def tree_of(plan: Plan, account: Account | None) -> Tree:
    """The operators by module.

    If the model is given, they have the words of schemes and their collectives.
    """
    rows = folded_names(_by_account(account) if account else _by_file(plan))
    full = {name.strip("/"): name for name in plan.operators}
    counts: Counter[str] = Counter()
    for names, (_, _, strategy, _) in rows:
        counts[strategy] += len(names)
    colours = {
        strategy: min(rank, COLOURED - 1) for rank, (strategy, _) in enumerate(counts.most_common())
    }
    root = Module(name="all operators")
    left = ROOM
    leaves: list[Leaf] = []
    for names, (name, kind, strategy, more) in rows:
        left -= ROW + 2 * len(name) + 2 * len(strategy) + len(kind) + len(more)
        if left < 0:
            break
        colour = colours[strategy]
        count = len(names)
        *path, leaf = tokens(name)
        at = root
        at.strategies[colour] += count
        for part in path:
            left -= 0 if part in at.modules else MODULE + len(part)
            at = at.modules.setdefault(part, Module(name=part))
            at.strategies[colour] += count
        members = tuple(full.get(name, name) for name in names)
        leaves.append(
            Leaf(
                number=len(leaves),
                path=tuple(path),
                members=members,
                name=leaf,
                count=count,
                kind=kind,
                strategy=strategy,
                colour=colour,
                more=more,
            )
        )
        at.leaves.append(leaves[-1])
    named = [strategy for strategy, _ in counts.most_common()]
    shown = named if len(named) <= COLOURED else [*named[: COLOURED - 1], "other strategies"]
    return Tree(
        root=root, leaves=tuple(leaves), colours=tuple(shown), left_out=len(rows) - len(leaves)
    )


def tokens(name: str) -> list[str]:
    """The parts of an operator's path; the number of a layer stays with the name of its list.

    >>> tokens("h.{0..11}/attn/c_attn/MatMul"), tokens("layers.0.up/linear"), tokens("/")
    (['h.{0..11}', 'attn', 'c_attn', 'MatMul'], ['layers.0', 'up', 'linear'], ['/'])
    """
    words: list[str] = []
    for token in _TOKEN.findall(name):
        if words and (token[0] == "{" or token.isdecimal()):
            words[-1] += f".{token}"
        else:
            words.append(token)
    if len(words) > DEEPEST:
        words[DEEPEST - 1 :] = ["/".join(words[DEEPEST - 1 :])]
    return words or [name]


def _by_file(plan: Plan) -> Iterable[tuple[str, ...]]:
    axes = [axis.name for axis in plan.mesh]
    for name, operator in plan.operators.items():
        words = [
            f"{axis}: {BARE.get(o, f'splits {o}')}"
            for axis, o in zip(axes, operator.strategy, strict=False)
        ]
        places = (
            ", ".join(dict.fromkeys(layout for _, layout in operator.inputs)),
            ", ".join(layout for _, layout in operator.outputs),
        )
        yield name.strip("/"), operator.kind, "; ".join(words), " → ".join(filter(None, places))


def _by_account(whole: Account) -> Iterable[tuple[str, ...]]:
    for account in whole.operators:
        kinds = Counter(c.kind for c, _ in account.collectives)
        seconds = sum(seconds for _, seconds in account.collectives)
        more = f"{collective_text(kinds)}, {seconds_text(seconds)}" if kinds else ""
        yield account.operator.name.strip("/"), account.operator.kind, phrase(account, whole), more
