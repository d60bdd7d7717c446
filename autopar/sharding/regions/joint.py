"""Regions: operators whose strategies follow from the strategy of one of them, its lead.

On one axis a region takes a joint option: an option of each member, such that every value inside is
made in the placement in which it is read (see `groups` for what joins).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.sharding.layout import Placement
from autopar.sharding.strategies import Option, Strategies

MOST = 64
"""The most joint options of a region."""

Link = tuple[int, int, int, int]
"""A value inside a region: the member and output that makes it, the member and input that reads it.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Operators that are decided as one, by name, in the order of the graph.

    `name`: the module in which the lead lies, and what the region is, if the module has several.
    """

    name: str
    lead: str
    members: tuple[str, ...]
    links: tuple[Link, ...] = ()

    def apart(self) -> tuple[Region, ...]:
        """The members, each by itself."""
        return tuple(replace(self, lead=name, members=(name,), links=()) for name in self.members)


def joint_options(
    options: Sequence[Sequence[Option]], links: Sequence[Link]
) -> list[tuple[int, ...]]:
    """The joint options of members with these options, each as the number of every member's.

    Empty if they are more than `MOST` in number.
    """
    joint: list[dict[int, int]] = [{}]
    for member, ends in _in_turn(len(options), links):
        fitting: dict[tuple[Placement, ...], list[int]] = {}
        for number, option in enumerate(options[member]):
            own = tuple((option.outputs if made else option.inputs)[at] for *_, at, made in ends)
            fitting.setdefault(own, []).append(number)
        # A join over all values between this member and those before.
        longer = []
        for taken in joint:
            beside = [(options[other][taken[other]], place, made) for other, place, _, made in ends]
            theirs = tuple((of.inputs if made else of.outputs)[at] for of, at, made in beside)
            longer += [{**taken, member: number} for number in fitting.get(theirs, ())]
        joint = longer
        if not 0 < len(joint) <= MOST:
            return []
    return [tuple(taken[member] for member in range(len(options))) for taken in joint]


def _in_turn(
    count: int, links: Sequence[Link]
) -> Iterator[tuple[int, list[tuple[int, int, int, bool]]]]:
    """The members in an order in which each is linked to one before, with its links to those.

    A link: the other member, its place, the own place, and whether the member itself makes it.
    """
    ends: dict[int, list[tuple[int, int, int, bool]]] = {member: [] for member in range(count)}
    for a, out, b, into in links:
        ends[a].append((b, into, out, True))
        ends[b].append((a, out, into, False))
    done: list[int] = []
    ready = {count - 1}
    while ready:
        member = max(ready)
        yield member, [end for end in ends[member] if end[0] in done]
        done.append(member)
        ready |= {other for other, *_ in ends[member]}
        ready.difference_update(done)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Joint:
    """The strategies of a region: of every member, those that go together in equal rows.

    `digits`: array [rows, axes], the joint option that a row takes on each axis.
    """

    strategies: tuple[Strategies, ...]
    digits: NDArray[np.int64]


def joint_strategies(region: Region, strategies: Sequence[Strategies]) -> Joint | None:
    """The strategies of a region whose members have these by themselves.

    None if a member would lack some that it has by itself, of the options that are in the region.
    """
    lead = region.members.index(region.lead)
    joint = joint_options([mine.options for mine in strategies], region.links)
    if not joint:
        return None
    joint.sort(key=lambda numbers: (numbers[lead], numbers))
    options = np.array(joint, dtype=np.int64).T
    first = strategies[lead].choices
    digits = np.zeros((len(first), 0), dtype=np.int64)
    rows = np.arange(len(first))
    # Each strategy of the lead, once for each way in which the others go with it.
    for axis in range(first.shape[1]):
        row, taken = np.nonzero(options[lead] == first[rows, axis][:, None])
        digits = np.column_stack((digits[row], taken))
        rows = rows[row]
    # Shards of every member have to be equal in size.
    for mine, numbers in zip(strategies, options, strict=True):
        digits = digits[np.isin(_codes(numbers[digits], mine), _codes(mine.choices, mine))]
    together = [numbers[digits] for numbers in options]
    for mine, numbers, choices in zip(strategies, options, together, strict=True):
        own = mine.choices[np.isin(mine.choices, numbers).all(axis=1)]
        if len(np.unique(_codes(choices, mine))) < len(own):
            return None
    rows_of = zip(strategies, together, strict=True)
    return Joint(
        strategies=tuple(
            replace(mine, choices=np.ascontiguousarray(choices)) for mine, choices in rows_of
        ),
        digits=digits,
    )


def _codes(choices: NDArray[np.int64], strategies: Strategies) -> NDArray[np.int64]:
    """A number for each row of choices."""
    base = len(strategies.options)
    return np.asarray(choices @ base ** np.arange(choices.shape[1], dtype=np.int64))
