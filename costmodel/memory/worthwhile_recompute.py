"""The segments whose recompute saves bytes.

    saved by a segment =  bytes that only its own operators keep for the backward pass
                        - bytes of its inputs that nothing else keeps

Sizes are those of whole tensors. A segment that saves less than `LEAST` of what it keeps is not
recomputed, as one of a fused attention alone: its values are kept as without recompute.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from autopar.ir import Role
from autopar.sharding.analysis import Analysis

from .saved_values import facts_of, places_saved, roots_of

Segments = tuple[tuple[str, ...], ...]
LEAST = 0.05
"""The least share of its bytes for which a segment is computed twice."""


def worthwhile(analysis: Analysis, segments: Segments) -> Segments:
    """The segments that save bytes while all the others of the result are recomputed, too."""
    return _Keepers(analysis, segments).worthwhile()


class _Keepers:
    """The memories that each segment keeps, recomputed and not, and all keepers of each.

    `plain`, `entering`: the memories of a segment that is not recomputed, and of one that is.
    `held`: the segments that keep a memory; -1: an operator outside of all.
    """

    def __init__(self, analysis: Analysis, segments: Segments) -> None:
        self.analysis = analysis
        self.segments = segments
        self.facts = facts_of(analysis)
        self.operators = {op.name: op for op in analysis.warm}
        self.roots = roots_of(analysis, self.facts)
        segment_of = {name: number for number, names in enumerate(segments) for name in names}
        plain = places_saved(analysis, self.facts, {})
        entering = places_saved(analysis, self.facts, segment_of)
        self.plain = [self._memories(plain, names) for names in segments]
        self.entering = [self._memories(entering, names) for names in segments]
        self.held: defaultdict[str, set[int]] = defaultdict(set)
        outside = [op.name for op in analysis.warm if op.name not in segment_of]
        for memory in self._memories(plain, outside):
            self.held[memory].add(-1)
        for number, memories in enumerate(self.entering):
            for memory in memories:
                self.held[memory].add(number)

    def _memories(
        self, places: dict[str, list[tuple[bool, int, str]]], names: Iterable[str]
    ) -> set[str]:
        """The activations that operators keep, each as the tensor whose memory it is."""
        tensors = self.analysis.graph.tensors
        saved = {
            self.roots.get(name, name)
            for operator in names
            for _, _, name in places.get(operator, ())
        }
        return {name for name in saved if tensors[name].role is Role.ACTIVATION}

    def worthwhile(self) -> Segments:
        """Leave out segments that save nothing, until all of the rest save something."""
        taken = dict.fromkeys(range(len(self.segments)))
        while wasted := [number for number in taken if self._saved(number) <= 0]:
            for number in wasted:
                # One that is left out keeps its values, which others may then enter for nothing.
                if self._saved(number) <= 0:
                    self._leave_out(number)
                    del taken[number]
        return tuple(self.segments[number] for number in taken)

    def _saved(self, number: int) -> float:
        own = {number}
        given_up = (m for m in self.plain[number] if not self.held[m])
        added = (m for m in self.entering[number] - self.plain[number] if self.held[m] == own)
        return (
            self._bytes(given_up)
            + sum(self._buffers(name) for name in self.segments[number])
            - self._bytes(added)
            - LEAST * self._bytes(self.plain[number])
        )

    def _bytes(self, memories: Iterable[str]) -> float:
        return float(sum(self.analysis.graph.tensors[name].bytes for name in memories))

    def _leave_out(self, number: int) -> None:
        for memory in self.entering[number]:
            self.held[memory].discard(number)
        for memory in self.plain[number]:
            self.held[memory].add(-1)

    def _buffers(self, name: str) -> float:
        """Bytes that an operator keeps besides values of the graph, such as masks and sums."""
        operator = self.operators[name]
        tensors = self.analysis.graph.tensors
        total = 0.0
        for made in self.facts[name].keeps.made:
            # Those that pass something on are there under some splits only.
            if not made.passed:
                names = operator.outputs if made.output else operator.inputs
                total += made.nbytes * tensors[names[made.position]].size
        return total
