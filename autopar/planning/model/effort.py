"""The numbers that limit the work of planning: one frozen value, each with its meaning.

None of them changes the price of a plan, only which plans are looked at. `docs/search.md` has the
table of what each earns, measured by `benchmarks/ablation.py`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is looked at. Shares are of a step or of the memory; counts are of tries."""

    # --- The outer search. ---

    close: float = 1e-3
    """The share by which a promise must be below the incumbent to be looked at."""
    margin: float = 0.025
    """The share by which a program without stages may be faster than the bound of its tables, as
    these count units of parameters and what hides them only on average.
    """
    plain_axes: int = 2
    """Axes of the meshes on which all stages and micro-batches are tried."""
    split: int = 3
    """The fastest candidates whose meshes have an axis split in two."""
    finer: int = 3
    """Ways in which an axis is split in two."""
    filled: int = 4
    """Micro-batches for each stage with which unequal groups of devices are tried."""

    # --- The certificate. ---

    certified: float = 5e-3
    """The gap at which bounds are no longer raised."""
    proven: int = 192
    """How many of the least bounds are raised by solutions of their own."""
    within: int = 16
    """How many of the least bounds, without stages, are raised by solutions within the memory."""
    slack: float = 0.9
    """The least time of a part of the work beside its share of one device's, as small shards may
    fit a device better than the whole.
    """

    # --- A candidate. ---

    bounded: float = 2e-3
    """The gap at which a solution counts as exact, as its program is played anyway."""
    remembered: int = 128
    """Candidates of which parts of tables are remembered for the next mode."""
    exposed: float = 1.005
    """A program may take this much longer than promised until smaller hidden shares are tried."""
    shares: tuple[float, ...] = (0.0,)
    """The smaller hidden shares, as parts of the largest."""

    # --- Where memory binds. ---

    fittings: int = 4
    """How often a candidate is solved until its program fills the memory."""
    full: float = 0.97
    """The share of the memory that counts as all of it."""
    plenty: float = 0.5
    """The share of the memory up to which it is no question what programs need beyond tables."""
    behind: float = 1.05
    """Programs up to this much behind the best are split into finer meshes, and pipelines played
    at other shares: they were up to 6 % faster there.
    """

    # --- The programs of the whole graph. ---

    likely: float = 1.1
    """The excess of a folded program over the memory up to which that of the whole graph is made.
    """
    tried: int = 8
    """Programs of little memory that are tried where no plan is known that fits."""


EFFORT = Effort()
