"""The bytes of a device at the peak of a training step (or of an inference), part by part.

    peak = parameters + optimizer state + master weights
           + max over the moments t of (activations(t) + gradients(t) + buffers(t) + passing(t))

`predicted_memory` plays the order of the runtime's step (see `runtime_liveness`); `autograd_memory`
walks a program as plain autograd runs it (see `autograd_liveness`). `in_flight`: the number of
micro-batches (of a pipeline stage, times the layers that the program stands for) whose activations
count. `optimizer_shards`, `gradient_shards`: the number of devices over which optimizer state (with
master weights) and gradients are split, besides the storage of their parameters (ZeRO 1 and 2).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from autopar.costmodel.frameworks.framework import AUTOPAR, Framework
from autopar.order.scheduled import Scheduled, scheduled
from autopar.sharding.analysis import Analysis
from autopar.sharding.program import Program
from autopar.sharding.rules.saved_for_backward import Saving
from autopar.sharding.schedule import PLAIN, Schedule

from .autograd_liveness import AUTOGRAD, Autograd, live_bytes
from .live_bytes import Live
from .precision import Precision
from .recompute import recompute_by
from .runtime_liveness import step_bytes
from .saved_values import facts_of
from .states import States, Training, states_of
from .step_script import Habits


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes on one device at its peak, part by part.

    `parameters`: with buffers, the needed parts of inputs, and gathered copies. `activations`:
    values saved by autograd, of all micro-batches in flight. `buffers`: flat messages under way.
    `transient`: everything else alive at the peak. Not in the total: `saved`: bytes that one
    micro-batch leaves from its forward to its backward pass; `travelling`: bytes at the peak that
    smaller units of parameters might not hold (gathered copies, flat messages, gradients); `host`:
    bytes in the memory of the device's host.
    """

    parameters: float
    gradients: float
    master: float
    optimizer: float
    activations: float
    buffers: float
    transient: float
    saved: float
    travelling: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the total by name."""
        names = (
            "parameters",
            "gradients",
            "master",
            "optimizer",
            "activations",
            "buffers",
            "transient",
        )
        return {name: getattr(self, name) for name in names}


def predicted_memory(
    program: Program | Scheduled,
    analysis: Analysis,
    *,
    optimizer: str,
    composite: bool = False,
    framework: Framework = AUTOPAR,
    schedule: Schedule = PLAIN,
) -> Memory:
    """Return the bytes of one device at the peak of a step, as a framework keeps its values.

    The step runs under the program's own schedule or `schedule`. With micro-batches the program is
    that of one of them. `composite`: with a CPU's kernels (see `rules.saved_for_backward`), where
    the optimizer takes one parameter after another.
    """
    plan = scheduled(program, schedule) if isinstance(program, Program) else program
    chosen = Precision(types=plan.schedule.types, state=framework.moment)
    training = Training(optimizer=optimizer, precision=chosen)
    states = states_of(plan.program, analysis, training)
    saving = replace(framework.saving, composite=composite, counted=True)
    own = framework.habits
    recompute = recompute_by(own, plan.schedule.recompute, analysis)
    if recompute.segments != plan.schedule.recompute:
        plan = scheduled(plan.program, replace(plan.schedule, recompute=recompute.segments))
    habits = Habits(regather=own.regather, discarded=recompute.discarded, stays=recompute.stays)
    live = step_bytes(plan, facts_of(analysis, saving), habits, train=analysis.train)
    return _at_peak(
        states,
        live,
        main=False,
        in_flight=1.0,
        temporaries=states.temporaries(optimizer, chosen, one_by_one=composite),
    )


def autograd_memory(
    program: Program,
    analysis: Analysis,
    training: Training,
    passes: Autograd = AUTOGRAD,
    *,
    in_flight: float = 1.0,
    composite: bool = False,
) -> Memory:
    """Return the bytes of one device at the peak of a step of plain autograd.

    Other frameworks run such steps. Gradients are accumulated where the precision or several
    micro-batches in flight want it. `composite`: as in `predicted_memory`.
    """
    states = states_of(program, analysis, training)
    main = analysis.train and (training.precision.main or in_flight > 1)
    facts = facts_of(analysis, Saving(composite=composite))
    live = live_bytes(program, facts, replace(passes, train=analysis.train, accumulating=main))
    temporaries = states.temporaries(training.optimizer, training.precision, one_by_one=composite)
    return _at_peak(states, live, main=main, in_flight=in_flight, temporaries=temporaries)


def _at_peak(
    states: States, live: Live, *, main: bool, in_flight: float, temporaries: float
) -> Memory:
    """The memory at the moment of the step's largest sum, or in the optimizer's step after it."""
    # The walk holds the activations of one micro-batch; the others in flight wait meanwhile.
    waiting = (in_flight - 1) * live.saved
    parts = (live.activations, live.gradients, live.buffers, live.passing, live.gathered)
    totals = functools.reduce(np.add, parts)
    peak = int(totals.argmax())
    activations, gradients, buffers, passing, gathered = (float(part[peak]) for part in parts)
    fixed = {
        "master": states.master,
        "optimizer": states.optimizer,
        "saved": live.saved,
        "host": states.host,
    }
    # When the optimizer runs, activations are gone and all gradients are there.
    # Permanent buffers of gradients (`main`) exist in both moments, and are not in the walk.
    if states.gradients + temporaries > float(totals[peak]) + waiting + (
        states.gradients if main else 0.0
    ):
        return Memory(
            **fixed,
            parameters=states.parameters,
            gradients=states.gradients,
            transient=temporaries,
            activations=0.0,
            buffers=0.0,
        )
    return Memory(
        **fixed,
        parameters=states.parameters + gathered,
        travelling=gathered + gradients + buffers,
        gradients=states.gradients if main else gradients,
        activations=activations + waiting,
        buffers=buffers,
        transient=passing,
    )
