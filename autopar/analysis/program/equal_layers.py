"""Folds equal layers: rows of equal strategy that differ by layer numbers are one.

h.0/attn/c_attn/MatMul, h.0/attn/c_attn/Add, h.1/attn/c_attn/MatMul, ...
→  h.{0..11}/attn/c_attn   24 operators
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from .account import Account, OperatorAccount
from .strategy_words import is_product, phrase

_NUMBER = re.compile(r"(?<![^./])\d+(?![^./])")
_COPY = re.compile(r"[._]\d+$")
TOP = "(top level)"
HOLE = "\0"


@dataclass(slots=True, kw_only=True)
class Group:
    """Equally split operators; `collectives`: their number by kind, over all folded layers."""

    name: str
    strategy: str
    operators: list[str] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Rows:
    """The rows of one module name without its layer numbers."""

    numbers: list[tuple[int, ...]] = field(default_factory=list)
    members: list[list[OperatorAccount]] = field(default_factory=list)


def module_of(name: str) -> tuple[str, str]:
    """The module path of an operator, and its own name without the number of its copy.

    If the name has only dots, the module path is the path of the layer.

    >>> module_of("/h.0/attn/c_attn/MatMul_1"), module_of("h.0.qkv/linear")
    (('h.0/attn/c_attn', 'MatMul'), ('h.0.qkv', 'linear'))
    >>> module_of("h.0.mlp.gate"), module_of("Add_17")
    (('h.0.mlp', 'gate'), ('', 'Add'))
    """
    module, slash, leaf = name.strip("/").rpartition("/")
    if not slash and _NUMBER.search(path := leaf.rpartition(".")[0]):
        module = path
        leaf = leaf.removeprefix(f"{path}.")
    return module, _COPY.sub("", leaf) or leaf


def number_text(numbers: Iterable[int]) -> str:
    """Numbers of layers in the shortest form.

    >>> number_text([0, 1, 2, 3]), number_text([7]), number_text([0, 2, 5, 6, 7])
    ('{0..3}', '7', '{0,2,5..7}')
    """
    ordered = sorted(set(numbers))
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    parts = [_run_text(run) for run in runs]
    return parts[0] if len(ordered) == 1 else "{" + ",".join(parts) + "}"


def _run_text(run: Sequence[int]) -> str:
    """Successive numbers: a range if they are more than two."""
    if len(run) > 2:
        return f"{run[0]}..{run[-1]}"
    return ",".join(map(str, run))


def groups_of(whole: Account) -> list[Group]:
    """The rows of the table, in the order of their first operators."""
    modules: dict[str, list[OperatorAccount]] = {}
    for account in whole.operators:
        modules.setdefault(module_of(account.operator.name)[0], []).append(account)
    rows: dict[tuple[str, str, str], _Rows] = {}
    for module, members in modules.items():
        template = _NUMBER.sub(HOLE, module)
        numbers = tuple(int(number) for number in _NUMBER.findall(module))
        for strategy, leaves, held in _split_alike(members, whole):
            row = rows.setdefault((template, strategy, leaves), _Rows())
            row.numbers.append(numbers)
            row.members.append(held)
    order = {account.operator.name: index for index, account in enumerate(whole.operators)}
    groups = [group for key, row in rows.items() for group in _folded(key, row)]
    return sorted(groups, key=lambda group: order[group.operators[0]])


def _split_alike(
    members: Sequence[OperatorAccount], whole: Account
) -> list[tuple[str, str, list[OperatorAccount]]]:
    """The operators of one module by strategy: (strategy, operator names, operators).

    The names are empty if the module has one row.

    If one of them multiplies by a weight, the others (its bias, its casts) share its row.
    """
    products = [account for account in members if is_product(account, whole)]
    if len(products) == 1 and module_of(products[0].operator.name)[0]:
        others = [account for account in members if account is not products[0]]
        return [(phrase(products[0], whole, others), "", list(members))]
    by_strategy: dict[str, list[OperatorAccount]] = {}
    for account in members:
        by_strategy.setdefault(phrase(account, whole), []).append(account)
    several = len(by_strategy) > 1 or not module_of(members[0].operator.name)[0]
    return [
        (strategy, _own_names(held) if several else "", held)
        for strategy, held in by_strategy.items()
    ]


def _own_names(members: Sequence[OperatorAccount]) -> str:
    """The operators' names inside their modules, the first three if there are more than four."""
    names = list(dict.fromkeys(module_of(account.operator.name)[1] for account in members))
    return ", ".join(names if len(names) <= 4 else [*names[:3], f"{len(names) - 3} more"])


def _folded(key: tuple[str, str, str], row: _Rows) -> list[Group]:
    """The groups of a row: one if its numbers make all combinations, else one a first number."""
    template, strategy, leaves = key
    columns = [sorted(set(column)) for column in zip(*row.numbers, strict=True)]
    if math.prod(map(len, columns)) == len(set(row.numbers)):
        fixed = template.split(HOLE)
        name = (
            "".join(
                part
                for pair in zip(fixed, [*map(number_text, columns), ""], strict=True)
                for part in pair
            )
            or TOP
        )
        group = Group(name=f"{name}: {leaves}" if leaves else name, strategy=strategy)
        for account in (account for held in row.members for account in held):
            _add(group, account)
        return [group]
    # Not all combinations: split at the first place with several numbers, and fold each part.
    place = next(i for i, column in enumerate(columns) if len(column) > 1)
    parts: dict[int, _Rows] = {}
    for numbers, held in zip(row.numbers, row.members, strict=True):
        part = parts.setdefault(numbers[place], _Rows())
        part.numbers.append(numbers)
        part.members.append(held)
    return [group for part in parts.values() for group in _folded(key, part)]


def _add(group: Group, account: OperatorAccount) -> None:
    group.operators.append(account.operator.name)
    for collective, seconds in account.collectives:
        group.collectives[collective.kind] += 1
        group.nbytes += collective.nbytes
        group.seconds += seconds
