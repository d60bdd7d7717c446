"""A pipeline schedule as one row of data: the order of a stage's passes, and what follows.

The order of a stage is a word of the letters F, B, I, W (`autopar.order.actions`) and M, and a list
of visits, which are (chunk of the stage, micro-batch) pairs: the k-th forward pass makes the k-th
visit. Backward passes visit the chunks from the last to the first, and weight gradients follow the
backward passes. M is the next forward pass merged with the next backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopar.order.actions import Action, Pair, Word
from autopar.order.times import Times

Visits = list[tuple[int, int]]


def turns(warm: int, passes: int) -> str:
    """`warm` forward passes, then forward and backward in turns, then the last backward passes.

    >>> turns(2, 4)
    'FFFBFBBB'
    """
    return "F" * warm + "FB" * (passes - warm) + "B" * warm


def _one_by_one(stages: int, micro_batches: int, interleave: int) -> Visits:
    return [(0, k) for k in range(micro_batches)]


def _anything(stages: int, micro_batches: int, interleave: int) -> str:
    return ""


def _any_numbers(stages: int, micro_batches: int) -> str:
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchClass:
    """The class of `torch.distributed.pipelining` that runs the order of a schedule.

    name            of the class
    several         whether it takes the list of a rank's stages, not a single one
    refuses(p, m)   the reason why it cannot run m micro-batches on p stages, or nothing
    """

    name: str
    several: bool = False
    refuses: Callable[[int, int], str] = _any_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNames:
    """The names of a schedule in other projects; a project without it has none.

    torch             its class in PyTorch
    torchtitan        its `pipeline_parallel_schedule`
    torchtitan_alike  values of that key, in lower case, that are read as the nearest schedule: this
    megatron          whether Megatron-LM runs it; its arguments name the chunks of a stage, and
                      whether passes are merged, alone
    """

    torch: TorchClass | None = None
    torchtitan: str | None = None
    torchtitan_alike: tuple[str, ...] = ()
    megatron: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """A schedule of p stages that run m micro-batches, each stage with v chunks of the model.

    name, description, source, year   for people; schedules are listed by year and name
    words(stage, p, m, v)   the passes of a stage in order; I is a backward pass without weight
                            gradients, W those gradients, B both together, M an F and a B merged
    visits(p, m, v)         (chunk of the stage, micro-batch) of each forward pass, in order
    seconds(times, m, v)    a step of p > 1 stages in closed form
    bubble(p, w, v)         idle time of a stage in a step of equal stages without sends, in passes
                            (forward and backward of a micro-batch); a share w of a pass makes
                            gradients of weights
    preferred               of several equally fast schedules, the one with the lowest number is
                            taken
    chunks                  numbers of chunks a stage that a search tries; none: a stage holds one
                            chunk
    refuses(p, m, v)        the reason why the schedule cannot run these, or nothing
    scheme                  whether a known scheme bears its name, so that plans are compared with
                            it
    other_names             what other projects call it
    """

    name: str
    description: str
    source: str
    year: int
    words: Callable[[int, int, int, int], str]
    seconds: Callable[[Times, int, int], float]
    bubble: Callable[[int, float, int], float]
    preferred: int
    visits: Callable[[int, int, int], Visits] = _one_by_one
    chunks: tuple[int, ...] = ()
    refuses: Callable[[int, int, int], str] = _anything
    scheme: bool = False
    other_names: OtherNames = OtherNames()

    @property
    def splits(self) -> bool:
        """Whether weight gradients are passes of their own."""
        return "W" in self.words(0, 1, 1, 1)

    @property
    def merges(self) -> bool:
        """Whether passes of two micro-batches are merged."""
        return "M" in self.words(0, 1, 2, 1)

    def refusal(self, stages: int, micro_batches: int, interleave: int) -> str:
        """The reason against such a pipeline; empty if there is none."""
        if min(stages, micro_batches, interleave) < 1:
            return (
                f"{stages} stages, {micro_batches} micro-batches and {interleave} chunks a stage: "
                "each must be at least 1"
            )
        if interleave > 1 and not self.chunks:
            return (
                f"the pipeline schedule {self.name!r} has one model chunk a stage, not {interleave}"
            )
        return self.refuses(stages, micro_batches, interleave)

    def order(
        self, stage: int, stages: int, micro_batches: int, interleave: int = 1
    ) -> list[Action | Pair]:
        """The passes of a stage."""
        visits = self.visits(stages, micro_batches, interleave)
        back = [(interleave - 1 - chunk, k) for chunk, k in visits]
        coming = {"F": iter(visits), "B": iter(back), "I": iter(back), "W": iter(back)}

        def following(letter: str) -> Action:
            chunk, k = next(coming[letter])
            return Action(word=Word(letter), chunk=chunk * stages + stage, micro_batch=k)

        return [
            (following("F"), following("B")) if letter == "M" else following(letter)
            for letter in self.words(stage, stages, micro_batches, interleave)
        ]

    def alive(self, stage: int, stages: int, micro_batches: int, interleave: int) -> int:
        """The most chunk passes that hold activations at once.

        A pass holds them from its forward pass to W, or to B where W is no pass of its own.
        """
        # As an array of bytes, as there may be thousands of micro-batches with two letters or more.
        # While passes are merged, all that both hold is there.
        text = self.words(stage, stages, micro_batches, interleave).replace("M", "FB")
        words = np.frombuffer(text.encode("ascii"), dtype=np.uint8)
        frees = ord("W" if self.splits else "B")
        return int(np.cumsum((words == ord("F")).astype(np.int64) - (words == frees)).max())
