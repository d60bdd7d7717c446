"""The distribution of a model's layers over the stages of a pipeline and their chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from autopar.errors import UsageError
from autopar.integrations.importing.pipeline_layout import check
from benchmarks.validating.known.shape import Shape

from .configuration import Configuration


def dealt(shape: Shape, c: Configuration, parameters: Mapping[str, float]) -> list[Counter[str]]:
    """Return the number of layers of each kind on each stage.

    "balanced" weighs both ends by `parameters`, elements of the parts.
    """
    kinds = shape.kinds()
    stages: list[Counter[str]] = [Counter() for _ in range(c.pipeline)]
    start = 0
    for chunk, count in enumerate(layers_of_chunks(shape, c, parameters)):
        # Consecutive chunks are on consecutive stages, as interleaved schedules have them.
        stages[chunk % c.pipeline].update(kinds[start : start + count])
        start += count
    return stages


def staged(
    shape: Shape, c: Configuration, parameters: Mapping[str, float]
) -> list[dict[str, float]]:
    """Return the number of each part on each stage, in the order of the model.

    `parameters`: elements of the parts.
    """
    stages = []
    for stage, layers in enumerate(dealt(shape, c, parameters)):
        letters = "".join(c.layout[stage :: c.pipeline])
        last = stage == c.pipeline - 1
        # Without a letter of their own these modules lie before the head.
        further = letters.count("m") / shape.mtp if "m" in "".join(c.layout) else float(last)
        members = {"embed": float(stage == 0), **layers, "mtp": further, "head": float(last)}
        stages.append({name: float(n) for name, n in members.items() if name in parameters})
    return stages


def layers_of_chunks(shape: Shape, c: Configuration, parameters: Mapping[str, float]) -> list[int]:
    """The number of layers of each chunk."""
    kinds = shape.kinds()
    chunks = c.pipeline * c.interleave
    if c.layout:
        check(c.layout, layers=len(kinds), further=shape.mtp, pipeline=c.pipeline)
        return [chunk.count("t") for chunk in c.layout]
    if chunks > len(kinds) + 2 * (c.habits.partition == "items"):
        raise UsageError(
            f"{chunks} pipeline stages, with their chunks, are more than the {len(kinds)} layers "
            "of the model"
        )
    return _counts(len(kinds), chunks, c.habits.partition, _ends(c, kinds, parameters))


def _ends(c: Configuration, kinds: tuple[str, ...], parameters: Mapping[str, float]) -> int:
    """The number of layers for which embedding and head each count."""
    if c.pipeline == 1 or c.habits.partition in ("even", "greedy"):
        return 0
    return (
        1 if c.habits.partition == "items" else round(parameters["embed"] / parameters[kinds[-1]])
    )


def _counts(layers: int, chunks: int, partition: str, ends: int) -> list[int]:
    """Return the number of layers of each chunk.

    A remainder goes to the middle chunks, or (greedy) is missing at the end.
    """
    if partition == "greedy":
        each = -(-layers // chunks)
        return [max(min(each, layers - each * chunk), 0) for chunk in range(chunks)]
    # Both ends count as `ends` layers each while the layers are dealt out.
    each, over = divmod(layers + 2 * ends, chunks)
    start = (chunks - over) // 2
    counts = [each + (start <= chunk < start + over) for chunk in range(chunks)]
    counts[0] -= ends
    counts[-1] -= ends
    return counts
