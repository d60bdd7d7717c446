"""Groups of operators that are decided as one.

A value that is redistributed between two members could as well be redistributed before or after
both, where that moves no more bytes:

    views       around a product, an attention, a norm or any other operator: they join it
    pointwise   operators that feed each other

Alpa merges such operators likewise (Zheng et al., OSDI 2022, 4.2), without the test that no member
loses an option.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from autopar.ir import Graph, Operator
from autopar.ir.bodies import POINTWISE
from autopar.ir.graph import unused_name
from autopar.sharding.layer_numbers import layer_of
from autopar.sharding.layout import B, Kind, P
from autopar.sharding.rules import RULES
from autopar.sharding.rules.saved_for_backward import shows
from autopar.sharding.strategies import Option

from .joint import Region, joint_options

WORDS: Mapping[str, str] = {
    "scaled_dot_product_attention": "attention",
    "attention": "attention",
    "rotate": "rotation",
    "experts": "experts",
    "topk": "router",
}
"""What a region is that has an operator of such a kind, the first of these."""
ACTIVATIONS = frozenset({"silu", "gelu", "relu", "sigmoid", "tanh"})


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
            maker = self.makers[name]
            reader = readers[0] if len(readers) == 1 else -1
            source = self.operators[maker]
            # Runtimes redistribute what a table gives where its module ends.
            if reader < 0 or len(source.outputs) > 1 or "embedding" in source.kind:
                continue
            if _follows(self.operators[reader]) and self._growth(reader) <= 0:
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
            if len(readers) == 1 and self._has_only(_follows, maker) and self._growth(maker) >= 0:
                self.join(maker, readers[0])

    def _growth(self, number: int) -> int:
        """Bytes that an operator gives beyond those that it reads first."""
        op = self.operators[number]
        tensors = self.graph.tensors
        return tensors[op.outputs[0]].own_bytes - tensors[op.inputs[0]].own_bytes

    def _has_only(self, some: Callable[[Operator], bool], *numbers: int) -> bool:
        """Whether the groups of operators have only such ones."""
        members = (member for number in numbers for member in self.members[self.group[number]])
        return all(some(self.operators[member]) for member in members)

    def join(self, one: int, other: int) -> None:
        """Join the groups of two operators if no member loses an option by it."""
        a = self.group[one]
        b = self.group[other]
        if a == b or self.layers[one] != self.layers[other]:
            return
        members = sorted((*self.members[a], *self.members[b]))
        # Layers repeat the same calls: each distinct union is looked at once.
        region = self.region(members, members[-1])
        options = [self.options[name] for name in region.members]
        read = (name for number in members for name in self.operators[number].inputs)
        key = (tuple(map(id, options)), region.links, tuple(map(self.given.get, read)))
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
        # By member, its options that are in the region.
        taken = [set(numbers) for numbers in zip(*joint, strict=True)]
        if not joint:
            return False
        if sum(not _follows(self.operators[number]) for number in members) > 1:
            # A partial sum is added up before others than those that only show it.
            sums = (options[index][number] for index, some in enumerate(taken) for number in some)
            if any(P in option.outputs and P not in option.inputs for option in sums):
                return False
        return all(
            # A view costs nothing, so that it does not matter how it is split.
            RULES[self.operators[number].kind].view
            or all(
                place in taken[index]
                for place, option in enumerate(options[index])
                if self._counts(self.operators[number], option)
            )
            for index, number in enumerate(members)
        )


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
    # A module around others is more than the region.
    outer = {m[:end] for m in modules for end, letter in enumerate(m) if letter in "./"}
    taken: set[str] = set()
    for region in regions:
        module, _, last = region.lead.rpartition("/")
        name = module
        if not module or modules[module] > 1 or module in outer:
            word = _word({kinds[member].partition(".")[2] for member in region.members}, last)
            name = f"{module}/{word}" if module else word
        name = unused_name(name, taken, ".")
        taken.add(name)
        yield replace(region, name=name)


def _word(kinds: Collection[str], last: str) -> str:
    """The word for a region with such operators; without one the `last` part of its lead's name.

    >>> _word({"silu.default", "mul.Tensor"}, "mul"), _word({"sin.default"}, "sin")
    ('gated_activation', 'sin')
    """
    kinds = {kind.partition(".")[0] for kind in kinds}
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
    small = of_torch or operator.kind == POINTWISE
    return entry is not None and not entry.products and small


def _follows(operator: Operator) -> bool:
    """Whether an operator only shows or casts a value."""
    return operator.kind in RULES and shows(operator.kind)
