"""The mode of a candidate: how parameters are stored, and what is computed again."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.planning.model import FoldedModel, Request
from autopar.planning.model.recompute import RECOMPUTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """The recompute mode and the ZeRO stage (see `Request`)."""

    zero: int
    recompute: str

    def repeats(self, other: Mode) -> bool:
        """Whether this mode does all the work of another one.

        Then it is no faster without a limit of memory.
        """
        # Full recompute includes the work of every other kind.
        recomputes = self.recompute == "full" or other.recompute in ("none", self.recompute)
        # ZeRO 0 stores parameters whole and gathers none, so no other stage repeats it.
        return recomputes and (0 < other.zero <= self.zero or other.zero == self.zero)


def recomputes_of(folded: FoldedModel, request: Request) -> list[str]:
    """The kinds of recompute that a request may have; the one of least work comes first."""
    if request.recompute is not None:
        return [request.recompute]
    # What is recomputed is found layer by layer, in runs of equal ones.
    if not request.train or not folded.runs:
        return ["none"]
    said = request.space.recomputes if request.space is not None else RECOMPUTES
    others = (mode for mode in said if mode != "none")
    return ["none", *(mode for mode in others if folded.segments(mode, short=True))]
