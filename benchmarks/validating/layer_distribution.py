"""The distribution of a model's layers over the chunks of a pipeline."""

from __future__ import annotations

from autopar.errors import UsageError
from autopar.integrations.importing.pipeline_layout import check
from autopar.ir import Graph
from benchmarks.validating.known.shape import Shape

from .configuration import Configuration


def layers_of_chunks(shape: Shape, c: Configuration, graph: Graph) -> list[int]:
    """The number of layers of each chunk of the model with this graph."""
    kinds = shape.kinds()
    chunks = c.pipeline * c.interleave
    if c.dealt:
        if len(c.dealt) != chunks or sum(c.dealt) != len(kinds):
            raise UsageError(
                f"{len(c.dealt)} chunks of {sum(c.dealt)} layers are not the {chunks} of a model "
                f"of {len(kinds)}"
            )
        return list(c.dealt)
    if c.layout:
        check(c.layout, layers=len(kinds), further=shape.mtp, pipeline=c.pipeline)
        return [chunk.count("t") for chunk in c.layout]
    if chunks > len(kinds) + 2 * (c.habits.partition == "items"):
        raise UsageError(
            f"{chunks} pipeline stages, with their chunks, are more than the {len(kinds)} layers "
            "of the model"
        )
    return _counts(len(kinds), chunks, c.habits.partition, _ends(c, len(kinds), graph))


def _ends(c: Configuration, layers: int, graph: Graph) -> int:
    """The number of layers for which embedding and head each count."""
    if c.pipeline == 1 or c.habits.partition in ("even", "greedy"):
        return 0
    if c.habits.partition == "items":
        return 1
    ends = ("embed.", f"layers.{layers - 1}.")
    table, layer = (sum(t.size for t in graph.parameters if t.name.startswith(e)) for e in ends)
    return round(table / layer)


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
