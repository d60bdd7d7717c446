"""The figures of a program that a plan predicts: seconds of a step by part, bytes of a device."""

from __future__ import annotations

from autopar.plan_parts import Predicted
from autopar.planning.stages import StagedProgram
from autopar.planning.stages.stage import once_of

from .priced_program import PricedProgram


def predicted_of(best: PricedProgram | StagedProgram) -> Predicted:
    """The figures of a program, of a pipeline those of its slowest stage."""
    return _of_stages(best) if isinstance(best, StagedProgram) else _of_one(best)


def _of_one(best: PricedProgram) -> Predicted:
    figures = best.estimate
    return Predicted(
        step=figures.step,
        forward=figures.forward,
        backward=figures.backward,
        update=figures.update,
        communication=figures.communication,
        overlapped=figures.overlapped,
        memory=figures.memory.total,
        memory_parts=figures.memory.parts,
        host_memory=figures.memory.host,
        streamed=figures.streamed,
    )


def _of_stages(best: StagedProgram) -> Predicted:
    """Figures of the slowest stage; what it waits for others is the bubble."""
    pipeline = best.pipeline
    count = best.schedule.micro_batches
    stages = best.stages
    parts = dict(zip(pipeline.stages, best.parts_of_stages, strict=True))
    groups = [pipeline.stages[number::stages] for number in range(stages)]
    slowest = max(
        groups,
        key=lambda group: sum(count * (s.forward + s.backward) + s.once + s.update for s in group),
    )
    fullest = max(groups, key=lambda group: sum(s.memory for s in group))
    moved = count * sum(s.moved for s in slowest)
    forward, backward = (
        count * sum(getattr(s, name) for s in slowest) for name in ("forward", "backward")
    )
    update = sum(s.update for s in slowest)
    exposed = (
        sum(s.once for s in slowest)
        - once_of(slowest, best.schedule.unit_bytes, best.parts[0].group.cluster).hidden
    )
    once = sum(s.once for s in slowest)
    stored = sum(float(parts[s].figures.stored[s.start : s.stop].sum()) for s in fullest)
    memory = sum(s.memory for s in fullest)
    # Each chunk has a host part; those of one device are a number of stages apart.
    hosts = [float(part.figures.host[s.start : s.stop].sum()) for s, part in parts.items()]
    busy = forward + backward + update + exposed
    # The times of passes include their communication, which a plan tells apart.
    computed = 1 - moved / (forward + backward) if moved else 1.0
    return Predicted(
        step=pipeline.step,
        forward=computed * forward,
        backward=computed * backward,
        update=update,
        communication=moved + once,
        overlapped=once - exposed,
        bubble=max(pipeline.step - busy, 0.0),
        memory=memory,
        memory_parts={"stored": stored, "activations": memory - stored},
        host_memory=max(sum(hosts[k::stages]) for k in range(stages)),
        streamed=sum(float(parts[s].figures.streamed[s.start : s.stop].sum()) for s in slowest),
    )
