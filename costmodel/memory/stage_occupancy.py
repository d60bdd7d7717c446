"""The memory of a device with many equal layers, from one layer and both ends of the model.

    peak of a stage = states + (in_flight - 1) * saved(all)
                      + max over its parts of (saved(up to the part) + excess(part))

saved(part): bytes that its operators are the first to keep for the backward pass. excess(part): the
most bytes alive while the part runs, above those that it and the parts before it saved. Source of
the form: V. Korthikanti et al., "Reducing activation recomputation in large transformer models"
(arXiv:2205.05198), sections 4 and 5.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from autopar.costmodel.device import Device
from autopar.sharding.analysis import Analysis
from autopar.sharding.program import Program

from .autograd_liveness import AUTOGRAD, Autograd, live_bytes
from .live_bytes import Live
from .peak import Memory
from .saved_values import facts_of
from .states import States, Training, states_of

ACTIVATION_SLACK = 0.05
PASSING_SLACK = 0.25
"""The caching allocator's overhead (blocks of other sizes, fragments), as shares of activations
and of transient bytes.

On 22 runs it had reserved 3 to 8 % more than was allocated at the peak
(MooreThreads/SimuMax@4dcaae51, docs/b200).
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The load of one part of a model on a device.

    `states`: stored bytes. `saved`, `excess`: bytes of a micro-batch.
    """

    states: States
    saved: float
    excess: float


def loads(
    program: Program,
    analysis: Analysis,
    part_of: Callable[[str], str],
    training: Training,
    passes: Autograd = AUTOGRAD,
) -> dict[str, Load]:
    """Return the loads of the parts of a program, in their order.

    `part_of` maps an operator's or tensor's name to its part. Values of no part (an input that is
    cut) count to the first part.
    """
    # Gradients are added to buffers that are stored all the time, which `states` counts.
    passes = replace(passes, train=True, accumulating=True)
    live = live_bytes(program, facts_of(analysis), passes)
    order = dict.fromkeys(part_of(op.name) for op in program.graph.operators)
    saved = dict.fromkeys(order, 0.0)
    for name, size in live.saved_of.items():
        part = part_of(name)
        saved[part if part in order else next(iter(order))] += size
    excess = _excess(live, part_of, saved)
    return {
        part: Load(
            states=states_of(
                program,
                analysis,
                training,
                of=lambda name, part=part: part_of(name) == part,  # type: ignore[misc]
            ),
            saved=saved[part],
            excess=excess[part],
        )
        for part in order
    }


def _excess(
    live: Live, part_of: Callable[[str], str], saved: Mapping[str, float]
) -> dict[str, float]:
    """The most bytes alive during each part, above those that it and the parts before it saved."""
    below = {}
    total = 0.0
    for part, size in saved.items():
        total += size
        below[part] = total
    excess = dict.fromkeys(saved, 0.0)
    for moment, name in enumerate(live.moments):
        part = part_of(name)
        if part in excess:
            alive = (
                live.activations[moment]
                + live.gradients[moment]
                + live.buffers[moment]
                + live.passing[moment]
            )
            excess[part] = max(excess[part], alive - below[part])
    return excess


def stage_memory(members: Sequence[tuple[Load, float]], *, in_flight: float) -> Memory:
    """Return the peak of a device with each load so many times, in order.

    `in_flight`: micro-batches between their passes.
    """
    saved = math.fsum(count * load.saved for load, count in members)
    held = (in_flight - 1) * saved
    peak = (0.0, 0.0)
    for load, count in members:
        held += count * load.saved
        if count:
            # The last of equal layers has the peak: all of them have saved by then.
            peak = max(peak, (held, load.excess), key=sum)

    def stored(name: str) -> float:
        return math.fsum(count * getattr(load.states, name) for load, count in members)

    return Memory(
        parameters=stored("parameters"),
        gradients=stored("gradients"),
        master=stored("master"),
        optimizer=stored("optimizer"),
        activations=peak[0],
        buffers=0.0,
        transient=peak[1],
        saved=saved,
    )


def occupied(memory: Memory, device: Device, *, expandable: bool = False) -> float:
    """Bytes that a job needs at its peak.

    Permanent tensors are allocated once and waste nothing; transient ones leave gaps; context and
    libraries take `device.reserved`. `expandable`: segments of the allocator grow by pages of 2
    MiB, so that free ones serve any size (torch's expandable_segments).
    """
    slack = (
        0.0
        if expandable
        else ACTIVATION_SLACK * memory.activations + PASSING_SLACK * memory.transient
    )
    return memory.total + slack + device.reserved
