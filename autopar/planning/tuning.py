"""The numbers by which the outer search is thorough or quick: one frozen value, each number with what it decides."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tuning:
    """Numbers that decide how much is tried. None of them changes what a plan costs, only which plans are looked at."""

    # --- The walk over the candidates. ---

    plain_axes: int = 2
    """Axes of the meshes on which all stages and micro-batches are tried; the best of them are split further."""
    beam: int = 48
    """Meshes, of the lowest bounds, that are solved at all."""
    nearest: int = 4
    """How many of the best meshes are tried with other numbers of micro-batches."""
    cut: float = 1.05
    """Pipelines that are expected to take up to so many times the best are cut."""
    proven: int = 192
    """How many of the least bounds are raised by solutions of their own."""
    looked: int = 20_000_000
    """Entries of tables up to which pipelines are bounded within the memory."""
    within: int = 8
    """How many of the least bounds, without stages, are raised by solutions within the memory."""
    alike: float = 0.05
    """By how much bounds on one mesh differ at most among which the next one to prove is chosen."""
    swept: int = 24
    """How many of the candidates that are left then, and whose bounds promise to be better, are solved."""
    rising: float = 1.02
    """A mesh on which the next number of micro-batches takes so much longer than the last one is left: times fall,
    then rise."""
    filled: int = 4
    """Micro-batches for each stage with which a mesh is tried first."""
    finer: int = 3
    """In how many ways an axis of the best candidate's mesh is split in two."""
    open: float = 1.03
    brief: float = 1e-2
    """By how much the best of a small model is above the bound until the programs of more candidates are looked at, and the seconds that it
    takes at most: of longer steps the tables tell enough."""
    fronts: int = 8
    """Devices up to which programs on the fronts of a small model are priced: of more devices there are too many candidates."""
    closer: float = 1.3
    varied: int = 5
    variable: float = 1.15
    """How far these are behind the best at most, and of how many of them all other solutions are looked at, where these are so near."""
    varied_hidden: tuple[float, ...] = (0.5, 0.0, 1.0)
    varied_front: int = 4
    """The shares that these have hidden of what can be, and how many solutions of less and less memory are looked at."""
    gain: float = 5e-3
    """Share of a step by which a finer mesh has to be faster."""
    close: float = 5e-3
    """Candidates whose bound is not better by this share are left; the bound that is reported counts them."""

    bounded: float = 2e-3
    """Gap up to which a solution that only bounds candidates, or is still to be cut into stages, is taken for the exact one."""

    # --- A candidate, solved within its memory. ---

    ranked: float = 1e-3
    """The same of a solution that ranks a candidate without stages, without a limit of memory."""
    remembered: int = 32
    """Candidates of which parts of tables are kept for the next mode."""
    seen: tuple[float, ...] = (0.5, 0.0)
    """Parts of the share of parameters' collectives that could be hidden, with which candidates are solved where
    there is more than that."""
    fittings: int = 4
    """How often a candidate is solved until its program fills the memory."""
    full: float = 0.97
    """Share of the memory that counts as all of it."""
    brimful: float = 0.99
    """The same of a small model."""
    plenty: float = 0.5
    surely: float = 0.1
    """Share of the memory up to which tables may fill it without a look at what programs need beyond them; of a small model, whose values
    of a moment may be several times what it keeps."""
    slack: float = 0.9
    """What the arithmetic may be below that of one device, for operators whose shards fit the device better than the
    whole."""
    certain: float = 1e-3
    """Share of a sum that is rounding."""

    # --- From solved candidates to programs. ---

    evaluated: int = 2
    """How many of the cheapest candidates have their programs built and priced exactly, at least."""
    near: float = 1.005
    close_calls: int = 4
    """Candidates that the tables put so near the best are evaluated too, up to so many."""
    promised: float = 1.02
    """How much longer than its solution promised a small program may take until one is made that waits less."""
    far: float = 1.05
    """A candidate that the tables put so far behind the best program is not evaluated at all."""
    whole: float = 1.01
    stored: float = 1.1
    """Parameters are tried stored whole where the tables put that up to so far behind the best program; and of a small model."""
    hopeful: float = 1.05
    """By how much a folded program may exceed the memory, while that of the whole graph is looked at all the same."""
    unfolded: float = 0.01
    """The gap of a folded solution up to which the whole graph is not solved again."""
    likely: float = 1.1
    """By how much the folded program of least memory may exceed the memory, while that of the whole graph is looked at."""
    rounding: float = 5e-4
    """Share of a step by which a plan may be slower if that makes equal layers alike."""
    mixed: float = 1.02
    """Programs that take up to so many times the best are tried with equal layers alike."""
    ways: int = 3
    """How many of the ways in which equal layers are treated are given to all of them."""
    tried: int = 8
    """How many are at most."""
    small_graph: int = 500
    """Operators of a graph up to which more are tried."""
    short: float = 1.05
    rounds: int = 3
    """By how much programs may take longer than their solutions promised, until the outer search is taken up again;
    how often it is."""


TUNING = Tuning()
