"""The figures of a program that a plan predicts: seconds of a step by part, bytes of a device."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.order.schedules import schedule_named
from autopar.plan_parts import Predicted
from autopar.planning.stages import StagedProgram
from autopar.planning.stages.stage import Stage, once_of

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
    parts = dict(zip(pipeline.stages, best.parts_of_stages, strict=True))
    # Chunk k runs on the devices of stage k modulo the number of stages.
    groups = [pipeline.stages[number :: best.stages] for number in range(best.stages)]
    slowest = max(
        groups,
        key=lambda chunks: sum(
            count * (chunk.forward + chunk.backward) + chunk.once + chunk.update for chunk in chunks
        ),
    )
    fullest = max(groups, key=lambda chunks: _sum(chunks, "memory"))

    def of_operators(chunks: Sequence[Stage], name: str) -> float:
        """The sum of a figure that is known for operators alone."""
        figures = ((chunk, getattr(parts[chunk].figures, name)) for chunk in chunks)
        return sum(float(of[chunk.start : chunk.stop].sum()) for chunk, of in figures)

    forward = count * _sum(slowest, "forward")
    backward = count * _sum(slowest, "backward")
    moved = count * _sum(slowest, "moved")
    update = _sum(slowest, "update")
    once = _sum(slowest, "once")
    cluster = best.parts[0].group.cluster
    exposed = once - once_of(slowest, best.schedule.unit_bytes, cluster).hidden
    merged = _pairs(best, groups.index(slowest)) * _sum(slowest, "hidden") / pipeline.interleave
    busy = forward + backward - merged + update + exposed
    # The times of passes include their communication, which a plan lists apart.
    computed = 1 - moved / (forward + backward) if moved else 1.0
    memory = _sum(fullest, "memory")
    stored = of_operators(fullest, "stored")
    return Predicted(
        step=pipeline.step,
        forward=computed * forward,
        backward=computed * backward,
        update=update,
        communication=moved + once,
        overlapped=once - exposed + merged,
        bubble=max(pipeline.step - busy, 0.0),
        memory=memory,
        memory_parts={"stored": stored, "activations": memory - stored},
        # A host holds the state of all chunks of its device.
        host_memory=max(of_operators(chunks, "host") for chunks in groups),
        streamed=of_operators(slowest, "streamed"),
    )


def _pairs(best: StagedProgram, stage: int) -> int:
    """The merged passes of a stage in a step, each of one chunk."""
    pipeline = best.pipeline
    row = schedule_named(pipeline.schedule)
    count = best.schedule.micro_batches
    return row.words(stage, best.stages, count, pipeline.interleave).count("M")


def _sum(chunks: Sequence[Stage], name: str) -> float:
    return sum(float(getattr(chunk, name)) for chunk in chunks)
