"""The pipeline schedules that a number of stages and micro-batches leaves."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from autopar.order.schedules import SCHEDULES, thriftiest
from autopar.planning.model import FoldedModel, Request


def schedules_for(
    stages: int,
    micro_batches: int,
    *,
    pieces: int,
    names: Collection[str] = tuple(SCHEDULES),
    interleave: int | None = None,
) -> Iterator[tuple[str, int]]:
    """Yield the possible (schedule, interleave) pairs in order of preference.

    `names`, `interleave`: only these schedules, or this number of chunks.
    """
    for row in sorted(SCHEDULES.values(), key=lambda row: row.preferred):
        for count in (row.chunks or (1,)) if interleave is None else (interleave,):
            # Every chunk needs at least one piece of the model to run.
            there = not row.refusal(stages, micro_batches, count) and (
                not row.chunks or stages * count <= pieces
            )
            if there and row.name in names:
                yield row.name, count


def thrifty(pipeline: str | None, stages: int, micro_batches: int) -> str:
    """Return the requested schedule if it has one chunk a stage, or else the thriftiest.

    That is the one with the fewest micro-batches in flight.
    """
    return (
        pipeline
        if pipeline is not None and not SCHEDULES[pipeline].chunks
        else thriftiest(stages, micro_batches).name
    )


def schedules_of(
    folded: FoldedModel, request: Request, stages: int, micro_batches: int
) -> tuple[tuple[str, int], ...]:
    """The possible (schedule, interleave) pairs of a request for so many stages.

    Tables do not know what merged passes hide. Without that they are no faster than others, so they
    are left out where others are possible.
    """
    return _among(without_merged(request.schedules), folded, request, stages, micro_batches)


def merging(
    folded: FoldedModel, request: Request, stages: int, micro_batches: int
) -> tuple[tuple[str, int], ...]:
    """The pairs of `schedules_of` that it leaves out: those whose schedule merges passes."""
    names = tuple(name for name in request.schedules if SCHEDULES[name].merges)
    return _among(names, folded, request, stages, micro_batches)


def _among(
    names: Collection[str], folded: FoldedModel, request: Request, stages: int, micro_batches: int
) -> tuple[tuple[str, int], ...]:
    return tuple(
        schedules_for(
            stages,
            micro_batches,
            pieces=len(folded.cuts),
            names=names,
            interleave=request.interleave,
        )
    )


def without_merged(names: Collection[str]) -> tuple[str, ...]:
    """The schedules that do not merge passes, or all if there are no others."""
    return tuple(name for name in names if not SCHEDULES[name].merges) or tuple(names)
