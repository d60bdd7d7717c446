"""Recompute by the habits of a framework: which values are made again, and which stay or go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autopar.costmodel.frameworks.habits import Habits
from autopar.ir.recipes import ATTENTIONS
from autopar.sharding.analysis import Analysis
from autopar.sharding.layer_numbers import by_layer
from autopar.sharding.rules.experts import EXPERTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Recompute:
    """Groups of operators, by name, whose values are recomputed in the backward pass.

    They are recomputed group by group, and not saved. `discarded`: further operators, whose results
    are given up after use and made again from their first input where the backward pass reads them.
    `stays`: operators of the groups whose results stay.
    """

    segments: tuple[tuple[str, ...], ...] = ()
    discarded: frozenset[str] = frozenset()
    stays: frozenset[str] = frozenset()


NO_RECOMPUTE = Recompute()


def recompute_by(
    habits: Habits, segments: Sequence[Sequence[str]], analysis: Analysis
) -> Recompute:
    """The segments as a framework recomputes them.

    Where operators beside them keep what they make, a layer as a whole is made again of that and
    its inputs (torch's selective activation checkpointing). Where results go, too, segments without
    attention and experts are made again by whoever reads them (Megatron-Core's checkpoints without
    output).
    """
    chosen = tuple(map(tuple, segments))
    repeated = {name for segment in chosen for name in segment}
    if habits.saves_outputs:
        layers = by_layer(op.name for op in analysis.warm)
        some = tuple(layer for layer in layers if not repeated.isdisjoint(layer))
        others = frozenset(name for layer in some for name in layer) - repeated
        return Recompute(segments=some, stays=others)
    if not habits.discards_outputs:
        return Recompute(segments=chosen)
    whole = {op.name for op in analysis.warm if op.kind in (*ATTENTIONS, EXPERTS)}
    held = tuple(segment for segment in chosen if not whole.isdisjoint(segment))
    return Recompute(segments=held, discarded=frozenset(repeated).difference(*held))
