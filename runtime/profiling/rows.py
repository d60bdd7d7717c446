"""The rows of a profile beside the plan's predictions, and the largest differences in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LARGEST = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Seconds (or bytes) of a step, measured and predicted; None if the plan predicts none."""

    part: str
    measured: float
    predicted: float | None
    unit: str = "s"


def largest(rows: Mapping[str, Sequence[Row]]) -> list[str]:
    """The largest differences from the predictions, in words.

    `rows`: by the name of their stage.
    """
    deviations: list[tuple[float, str]] = []
    for stage, own in rows.items():
        for row in own:
            # The step is the sum of the others.
            if row.predicted is None or row.unit != "s" or row.part == "step":
                continue
            if row.measured != row.predicted:
                words = f"{stage}: {words_of(row)}" if stage else words_of(row)
                deviations.append((abs(row.measured - row.predicted), words))
    deviations.sort(key=lambda deviation: -deviation[0])
    return [words for _, words in deviations[:LARGEST]]


def together(profiles: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The first rank's measurements, and those of all stages if there are several.

    `profiles`: results of `Profile.json`.
    """
    if len(profiles) < 2:
        return dict(profiles[0]) if profiles else None
    rows = {f"stage {one['stage']}": [Row(**part) for part in one["parts"]] for one in profiles}
    return {**profiles[0], "deviations": largest(rows), "stages": list(profiles)}


def words_of(row: Row) -> str:
    assert row.predicted is not None
    difference = row.measured - row.predicted
    share = f", {row.measured / row.predicted:.2g} times the predicted" if row.predicted > 0 else ""
    more = "more" if difference > 0 else "less"
    return (
        f"{row.part} takes {abs(difference) * 1e3:.3g} ms {more} than predicted: "
        f"{row.measured * 1e3:.3g} ms{share}"
    )
