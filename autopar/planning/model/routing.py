"""A stated routing of tokens to experts: even, the worst case, or counts from a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from autopar.errors import UsageError
from autopar.file_limits import EXPERTS, LAYERS, ROUTING_BYTES, ROWS
from autopar.printable import printable
from autopar.reading import read_json_object

ROUTINGS = ("even", "worst")
"""The words of a routing; anything else names a file."""

Count = Annotated[int, Field(ge=0, le=ROWS, strict=True)]
Row = Annotated[tuple[Count, ...], Field(min_length=1, max_length=EXPERTS)]


class _File(BaseModel):
    """Rows of tokens for each expert: of each layer of experts, or one for all layers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    counts: Annotated[tuple[Row, ...], Field(min_length=1, max_length=LAYERS)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """A routing; of `kind` "counts" with the rows of every expert by layer (one: of all layers)."""

    kind: str = "even"
    counts: tuple[tuple[int, ...], ...] = ()


def read_routing(text: str | Path) -> Routing:
    """The routing of a word or a JSON file; raises `UsageError` for any other file."""
    if text in ROUTINGS:
        return Routing(kind=str(text))
    data = read_json_object(text, ROUTING_BYTES, what="routing", error=UsageError)
    # One row of numbers stands for all layers.
    counts = data.get("counts")
    if isinstance(counts, list) and counts and not any(isinstance(row, list) for row in counts):
        data = {**data, "counts": [counts]}
    try:
        rows = _File.model_validate(data).counts
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise UsageError(printable(f"{text}: no routing: {where}: {first['msg']}")) from error
    for number, row in enumerate(rows):
        if not any(row):
            raise UsageError(f"{text}: no routing: counts.{number}: no expert has a row")
    return Routing(kind="counts", counts=rows)
