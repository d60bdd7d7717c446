"""`Source`: the origin of a figure of a cluster, and the kind of figure that it makes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Kind = Literal["data sheet", "measured", "fitted", "assumed", "stated"]
"""`stated`: somebody says so, and how they know it is not said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of a figure: a `text`, and the `kind` of figure.

    A fitted figure has its `error` on `rows` rows.
    """

    text: str
    kind: Kind = "stated"
    error: float | None = None
    rows: int | None = None

    @classmethod
    def of(cls, text: str) -> Source:
        """The source that a text states, of the kind that its first words name."""
        return cls(
            text=text,
            kind=next((kind for kind in get_args(Kind) if text.startswith(kind)), "stated"),
        )

    def __str__(self) -> str:
        said = (
            self.text
            if self.kind == "stated" or self.text.startswith(self.kind)
            else f"{self.kind}: {self.text}"
        )
        return (
            said
            if self.error is None
            else f"{said} ({self.error:.1%} off in the median of {self.rows} rows)"
        )
