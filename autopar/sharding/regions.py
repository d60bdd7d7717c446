"""Regions: operators whose strategies follow from the strategy of one of them, its lead.

On one axis a region takes a joint option: an option of each member, such that every value inside is
made in the placement in which it is read. A value that is redistributed between two members could
as well be redistributed before or after both, where that moves no more bytes:

    views       around a product, an attention, a norm or any other operator: they join it
    pointwise   operators that feed each other

Alpa merges such operators likewise (Zheng et al., OSDI 2022, 4.2), without the test that no member
loses an option.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autopar.ir import Graph, Operator
from autopar.ir.graph import unused_name

from .layer_numbers import layer_of
from .layout import B, Kind, P, Placement
from .rules import RULES
from .rules.saved_for_backward import shows
from .strategies import Option, Strategies

MOST = 64
"""The most joint options of a region."""
WORDS: Mapping[str, str] = {
    "scaled_dot_product_attention": "attention",
    "rotate": "rotation",
    "experts": "experts",
    "topk": "router",
}
"""What a region is that has an operator of such a kind, the first of these."""
ACTIVATIONS = frozenset({"silu", "gelu", "relu", "sigmoid", "tanh"})


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
        """The lead alone, and the regions of the other members that are left connected."""
        others = [name for name in self.members if name != self.lead]
        return (self._of([self.lead]), *self.among(others))

    def among(self, some: Sequence[str]) -> tuple[Region, ...]:
        """The connected regions of some members."""
        part = {name: name for name in some}
        names = self.members

        def root(name: str) -> str:
            while part[name] != name:
                name = part[name]
            return name

        for a, _, b, _ in self.links:
            if names[a] in part and names[b] in part:
                part[root(names[a])] = root(names[b])
        together: dict[str, list[str]] = {}
        for name in some:
            together.setdefault(root(name), []).append(name)
        return tuple(map(self._of, together.values()))

    def _of(self, members: Sequence[str]) -> Region:
        place = {name: number for number, name in enumerate(members)}
        ends = ((self.members[a], out, self.members[b], into) for a, out, b, into in self.links)
        links = tuple(
            (place[maker], out, place[reader], into)
            for maker, out, reader, into in ends
            if maker in place and reader in place
        )
        lead = self.lead if self.lead in place else members[-1]
        return replace(self, lead=lead, members=tuple(members), links=links)


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
    for axis in range(first.shape[1]):
        row, taken = np.nonzero(options[lead] == first[rows, axis][:, None])
        digits = np.column_stack((digits[row], taken))
        rows = rows[row]
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


def is_view(kind: str) -> bool:
    """Whether operators of a kind cost nothing, so that it does not matter how they are split."""
    return kind in RULES and RULES[kind].view


class _Grouping:
    """Groups that grow by joining neighbours, `group` by the number of an operator."""

    def __init__(
        self, graph: Graph, operators: Sequence[Operator], options: Mapping[str, Sequence[Option]]
    ) -> None:
        self.graph = graph
        self.operators = operators
        self.options = options
        self.group = list(range(len(operators)))
        self.members = {number: [number] for number in self.group}
        self.makers = {name: number for number, op in enumerate(operators) for name in op.outputs}
        self.given = {
            name: frozenset(option.outputs[place] for option in options[op.name])
            for op in operators
            for place, name in enumerate(op.outputs)
        }
        self.readers = self._readers()
        self.layers = [layer_of(op.name) for op in operators]
        self._known: dict[object, bool] = {}

    def _counts(self, operator: Operator, option: Option) -> bool:
        """Whether an option is one that a plan may want.

        Nobody makes a partial sum of a whole value: neither to pass it on, nor by splitting for a
        reduction what came whole. Neither side of a product of two values passes as one, nor what
        is added up before it is cast.
        """
        if P not in (*option.inputs, *option.outputs):
            return True
        if option.factor < 0 and (B in option.inputs or _follows(operator)):
            return False
        return all(
            placement in self.given[name] if name in self.given else placement != P
            for name, placement in zip(operator.inputs, option.inputs, strict=True)
            if placement == P or placement.kind is Kind.SPLIT
        )

    def region(self, members: Sequence[int], lead: int) -> Region:
        """The region of some operators."""
        place = {number: index for index, number in enumerate(members)}
        links = [
            (place[maker], self.operators[maker].outputs.index(name), index, into)
            for index, number in enumerate(members)
            for into, name in enumerate(self.operators[number].inputs)
            if (maker := self.makers.get(name, -1)) in place
        ]
        return Region(
            name="",
            lead=self.operators[lead].name,
            members=tuple(self.operators[number].name for number in members),
            links=tuple(links),
        )

    def _readers(self) -> dict[str, list[int]]:
        """The operators that read each value that is made here; -1 where it leaves the graph."""
        graph = self.graph
        readers: dict[str, list[int]] = {name: [] for name in self.makers}
        for number, op in enumerate(self.operators):
            for name in op.inputs:
                if name in readers:
                    readers[name].append(number)
        for name in (*graph.outputs, *graph.updates.values(), *filter(None, (graph.loss,))):
            readers.get(name, []).append(-1)
        return readers

    def join_after(self) -> None:
        """Join what shows a value that nothing else reads to what makes it, if that is no less."""
        for name, readers in self.readers.items():
            maker, reader = self.makers[name], readers[0] if len(readers) == 1 else -1
            if reader < 0 or len(self.operators[maker].outputs) > 1:
                continue
            # Runtimes redistribute what a table gives where its module ends.
            table = "embedding" in self.operators[maker].kind
            if _follows(self.operators[reader]) and not self._widens(reader) and not table:
                self.join(maker, reader)

    def join_before(self) -> None:
        """Join what shows a value to what reads it, if that is no less, and cheap neighbours."""
        for name, readers in self.readers.items():
            maker = self.makers[name]
            if min(readers, default=-1) < 0:
                continue
            of_all = [self.operators[reader] for reader in readers]
            # What a norm reads goes on beside it, as a residual does.
            if all(map(_is_cheap, of_all)) and not (
                len(readers) > 1 and any("norm" in op.kind for op in of_all)
            ):
                for reader in readers:
                    if self._has_only(_is_cheap, maker, reader):
                        self.join(maker, reader)
            if len(readers) == 1 and self._has_only(_follows, maker) and not self._narrows(maker):
                self.join(maker, readers[0])

    def _widens(self, number: int) -> bool:
        """Whether an operator gives more bytes than it reads first."""
        return self._bytes(number) > 0

    def _narrows(self, number: int) -> bool:
        """Whether an operator gives fewer bytes than it reads first."""
        return self._bytes(number) < 0

    def _bytes(self, number: int) -> int:
        op = self.operators[number]
        tensors = self.graph.tensors
        return tensors[op.outputs[0]].own_bytes - tensors[op.inputs[0]].own_bytes

    def _has_only(self, some: Callable[[Operator], bool], *numbers: int) -> bool:
        """Whether the groups of operators have only such ones."""
        members = (member for number in numbers for member in self.members[self.group[number]])
        return all(some(self.operators[member]) for member in members)

    def join(self, one: int, other: int) -> None:
        """Join the groups of two operators if no member loses an option by it."""
        a, b = self.group[one], self.group[other]
        if a == b or self.layers[one] != self.layers[other]:
            return
        members = sorted((*self.members[a], *self.members[b]))
        region = self.region(members, members[-1])
        options = [self.options[name] for name in region.members]
        given = (
            self.given.get(name) for number in members for name in self.operators[number].inputs
        )
        key = (tuple(map(id, options)), region.links, tuple(given))
        if key not in self._known:
            self._known[key] = self._is_lossless(members, options, region)
        if self._known[key]:
            self.members[a] = members
            del self.members[b]
            for number in members:
                self.group[number] = a

    def _is_lossless(
        self, members: Sequence[int], options: Sequence[Sequence[Option]], region: Region
    ) -> bool:
        joint = joint_options(options, region.links)
        taken = [set(numbers) for numbers in zip(*joint, strict=True)]
        if not joint:
            return False
        if sum(not _follows(self.operators[number]) for number in members) > 1:
            # A partial sum is added up before others than those that only show it.
            sums = (options[index][number] for index, some in enumerate(taken) for number in some)
            if any(map(_adds, sums)):
                return False
        return all(
            is_view(self.operators[number].kind)
            or all(
                place in taken[index]
                for place, option in enumerate(options[index])
                if self._counts(self.operators[number], option)
            )
            for index, number in enumerate(members)
        )


def _adds(option: Option) -> bool:
    """Whether an option makes partial sums."""
    return P in option.outputs and P not in option.inputs


def regions_of(
    graph: Graph, warm: Sequence[Operator], options: Mapping[str, Sequence[Option]]
) -> tuple[Region, ...]:
    """Every operator's region, in the order of their first members."""
    grouping = _Grouping(graph, warm, options)
    grouping.join_after()
    grouping.join_before()
    groups: list[list[int]] = []
    for members in grouping.members.values():
        # Views that nothing else joins are left apart: what is between them may be redistributed.
        shown = all(_follows(warm[number]) for number in members)
        groups += [[number] for number in members] if shown else [members]
    regions = [
        grouping.region(members, _lead(members, warm, options)) for members in sorted(groups)
    ]
    return tuple(_named(regions, {op.name: op.kind for op in warm}))


def _named(regions: Sequence[Region], kinds: Mapping[str, str]) -> Iterator[Region]:
    """The regions with names of their own."""
    modules = Counter(region.lead.rpartition("/")[0] for region in regions)
    outer = {module[:end] for module in modules for end in _ends(module)}
    taken: set[str] = set()
    for region in regions:
        module, _, last = region.lead.rpartition("/")
        name = module
        if not module or modules[module] > 1 or module in outer:
            word = _word({_short(kinds[member]) for member in region.members}, last)
            name = f"{module}/{word}" if module else word
        name = unused_name(name, taken, ".")
        taken.add(name)
        yield replace(region, name=name)


def _ends(module: str) -> list[int]:
    """Where the names of the modules around a module end."""
    return [place for place, letter in enumerate(module) if letter in "./"]


def _short(kind: str) -> str:
    return kind.split(".")[1] if "." in kind else kind


def _word(kinds: Collection[str], last: str) -> str:
    """What a region with such operators is; the `last` part of its lead's name, if it has no word.

    >>> _word({"silu", "mul"}, "mul"), _word({"transpose", "sin"}, "sin")
    ('gated_activation', 'sin')
    """
    if "mul" in kinds and not ACTIVATIONS.isdisjoint(kinds):
        return "gated_activation"
    return next((WORDS[kind] for kind in WORDS if kind in kinds), last)


def _lead(
    members: Sequence[int], warm: Sequence[Operator], options: Mapping[str, Sequence[Option]]
) -> int:
    """The member that does more than to show a value and has most options, the last of equals."""

    def weight(number: int) -> tuple[bool, int, int]:
        return not _follows(warm[number]), len(options[warm[number].name]), number

    return max(members, key=weight)


def _is_cheap(operator: Operator) -> bool:
    """Whether an operator reads and writes without any product or table."""
    entry = RULES.get(operator.kind)
    of_torch = operator.kind.startswith("aten.") and "embedding" not in operator.kind
    return entry is not None and not entry.products and of_torch


def _follows(operator: Operator) -> bool:
    """Whether an operator only shows or casts a value."""
    return operator.kind in RULES and shows(operator.kind)
