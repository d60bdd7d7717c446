"""The operators of a plan as a tree of modules with equal layers folded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from ...plan import Plan
from ..account import Account
from ..explain import BARE
from ..folding import folded_names
from ..tables import collective_text
from ..units import seconds_text
from ..words import phrase

DEEPEST = 10
ROOM = 1_800_000
"""The most characters of the tree, roughly."""
ROW, MODULE = 200, 500
"""The characters of a row and of a module besides their texts."""
COLOURED = 10
_TOKEN = re.compile(r"(?:\{[^}]*\}|[^/.{])+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """Operators alike in `count` layers; `number`: in the order of the tree's rows.

    `colour`: the number of the strategy (the last colour is for all rare ones). `path`: the modules around the row.
    `members`: the operators.
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
    """A module with its operators and inner modules; `strategies`: the number of operators below it by colour."""

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
    """The operators by module; if the model is given, in the words of schemes and with their collectives."""
    rows = folded_names(_by_account(account) if account else _by_file(plan))
    full = {name.strip("/"): name for name in plan.operators}
    counts: Counter[str] = Counter()
    for names, (_, _, strategy, _) in rows:
        counts[strategy] += len(names)
    colours = {strategy: min(rank, COLOURED - 1) for rank, (strategy, _) in enumerate(counts.most_common())}
    root = Module(name="all operators")
    left = ROOM
    leaves: list[Leaf] = []
    for names, (name, kind, strategy, more) in rows:
        left -= ROW + 2 * len(name) + 2 * len(strategy) + len(kind) + len(more)
        if left < 0:
            break
        colour, count = colours[strategy], len(names)
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
                number=len(leaves), path=tuple(path), members=members, name=leaf, count=count, kind=kind, strategy=strategy, colour=colour,
                more=more,
            )
        )  # fmt: skip
        at.leaves.append(leaves[-1])
    named = [strategy for strategy, _ in counts.most_common()]
    shown = named if len(named) <= COLOURED else [*named[: COLOURED - 1], "other strategies"]
    return Tree(root=root, leaves=tuple(leaves), colours=tuple(shown), left_out=len(rows) - len(leaves))


def tokens(name: str) -> list[str]:
    """The parts of an operator's path; the number of a layer stays with the name of its list.

    >>> tokens("h.{0..11}/attn/c_attn/MatMul"), tokens("layers.0.up/linear"), tokens("/")
    (['h.{0..11}', 'attn', 'c_attn', 'MatMul'], ['layers.0', 'up', 'linear'], ['/'])
    """
    found: list[str] = []
    for token in _TOKEN.findall(name):
        if found and (token[0] == "{" or token.isdecimal()):
            found[-1] += f".{token}"
        else:
            found.append(token)
    if len(found) > DEEPEST:
        found[DEEPEST - 1 :] = ["/".join(found[DEEPEST - 1 :])]
    return found or [name]


def _by_file(plan: Plan) -> Iterable[tuple[str, ...]]:
    axes = [axis.name for axis in plan.mesh]
    for name, operator in plan.operators.items():
        words = [f"{axis}: {BARE.get(o, f'splits {o}')}" for axis, o in zip(axes, operator.strategy, strict=False)]
        places = ", ".join(dict.fromkeys(layout for _, layout in operator.inputs)), ", ".join(layout for _, layout in operator.outputs)
        yield name.strip("/"), operator.kind, "; ".join(words), " → ".join(filter(None, places))


def _by_account(whole: Account) -> Iterable[tuple[str, ...]]:
    for account in whole.operators:
        kinds = Counter(c.kind for c, _ in account.collectives)
        seconds = sum(seconds for _, seconds in account.collectives)
        more = f"{collective_text(kinds)}, {seconds_text(seconds)}" if kinds else ""
        yield account.operator.name.strip("/"), account.operator.kind, phrase(account, whole), more
