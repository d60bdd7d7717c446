"""The hidden share of each collective, from the played timeline of a step.

hidden(collective) = seconds of its transfer during which the device computes / seconds of its
transfer
"""

from __future__ import annotations

import bisect
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from autopar.costmodel import Cluster
from autopar.costmodel.step.issuer import axes_of_stream
from autopar.costmodel.step.streams import COMPUTE, Event
from autopar.plan import Plan
from autopar.sharding.analysis import Analysis
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Collective

from .timelines import timeline_of_rank

Key = tuple[str, str, str, str]


class Hidden:
    """Seconds of transfers by tensor, kind, axis and phase: all, and hidden."""

    def __init__(self, events: Sequence[Event]) -> None:
        computed = sorted((event.start, event.end) for event in events if event.stream == COMPUTE)
        self.starts = [start for start, _ in computed]
        self.ends = [end for _, end in computed]
        self.before = [0.0, *itertools.accumulate(end - start for start, end in computed)]
        self.sent: dict[Key, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for event in events:
            if event.stream != COMPUTE:
                # [hidden seconds, all seconds]
                axes = axes_of_stream(event.stream)
                sums = self.sent[event.name, event.kind, axes, event.phase]
                sums[0] += self._computed(event.end) - self._computed(event.start)
                sums[1] += event.end - event.start

    def _computed(self, until: float) -> float:
        """The seconds of computation until a time."""
        place = bisect.bisect_right(self.starts, until)
        return self.before[place] - max(self.ends[place - 1] - until, 0.0) if place else 0.0

    def share(self, collectives: Iterable[Collective], over: Callable[[Axes], str]) -> float | None:
        """The hidden share of several collectives together; None if the timeline has none."""
        keys = dict.fromkeys((c.tensor, c.kind, over(c.axes), c.phase) for c in collectives)
        return _shared([self.sent[key] for key in keys if key in self.sent])

    def of(self, axis: str, phase: str, kind: str) -> float | None:
        """The hidden share of all collectives of a kind on an axis in a phase."""
        return _shared([sums for key, sums in self.sent.items() if key[1:] == (kind, axis, phase)])


def _shared(sums: Sequence[Sequence[float]]) -> float | None:
    """The ratio of hidden seconds to all seconds."""
    seconds = sum(sent for _, sent in sums)
    return min(sum(hidden for hidden, _ in sums) / seconds, 1.0) if seconds > 0 else None


def hidden_of(plan: Plan, analysis: Analysis, cluster: Cluster) -> Hidden | None:
    """The hidden seconds of a plan without stages.

    None with stages, whose timeline plays whole passes.
    """
    return None if plan.stages else Hidden(timeline_of_rank(plan, analysis, cluster).events)
