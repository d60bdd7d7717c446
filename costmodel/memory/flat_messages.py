"""Flat messages: several tensors redistributed along one chain of steps, joined in one message.

As in the runtime (`runtime/redistribution/flat_messages.py`), parts that are not contiguous are
copied together, then joined in a message, which lives until its result has been waited for. A sum
over all ranks is made in the message, and the tensors are views of it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from autopar.order.scheduled import Scheduled
from autopar.sharding.mesh import Axes
from autopar.sharding.program import Redistribute
from autopar.sharding.redistribution import change, local_bytes

from .live_bytes import BUFFER, LiveBytes
from .redistribution_memory import actions


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatStep:
    """One step of the tensors' chain: its collective, bytes and mesh axes.

    `kind`: of the collective ("" if nothing is sent). For each tensor: bytes `before` and `after`;
    `made`: whether the result is in new memory; `dealt`: whether its parts are not contiguous, so
    that they are copied apart or together.
    """

    kind: str
    axes: Axes
    nbytes: int
    before: tuple[int, ...]
    after: tuple[int, ...]
    made: tuple[bool, ...]
    dealt: tuple[bool, ...]

    @property
    def traffic(self) -> float:
        """Bytes read and written on the way into the message."""
        copied = sum(self.before)
        # Parts that are not contiguous are dealt out to the ranks first, which is a copy more.
        if self.kind != "all_gather":
            copied += sum(itertools.compress(self.before, self.dealt))
        return 2.0 * copied

    @property
    def copied(self) -> tuple[int, ...]:
        """Bytes of each tensor that is copied out of the received message."""
        if self.kind not in ("all_gather", "all_to_all") or (
            len(self.after) == 1 and not self.dealt[0]
        ):
            return ()
        return self.after


def flat_steps(plan: Scheduled, members: Sequence[int], *, back: bool) -> list[FlatStep]:
    """Return the steps of a group of redistributions, or, `back`, of their gradients.

    `members`: the redistributions by their steps of the program.
    """
    program = plan.program
    types = plan.schedule.types
    mesh = program.assignment.mesh.shape
    tensors = program.graph.tensors
    moves = [step for index in members if isinstance(step := program.steps[index], Redistribute)]
    chains = list(
        zip(*(itertools.pairwise(move.chain[move.bucketed :]) for move in moves), strict=True)
    )
    numbered = list(enumerate(chains))
    steps = []
    for number, pairs in reversed(numbered) if back else numbered:
        # The members of a group take the same steps, so any of them tells kind and axes.
        over = change(pairs[0][0], pairs[0][1], mesh)
        each = []
        for move, (first, second) in zip(moves, pairs, strict=True):
            tensor = tensors[move.tensor]
            nbytes = types.reduced_bytes(tensor) if back else tensor.bytes
            sizes = tuple(local_bytes(layout, nbytes, mesh) for layout in (first, second))
            own = change(first, second, mesh)
            act = actions(own.before, own.after, sizes[0], own.degree)[back]
            sent = own.transfers[back]
            each.append(
                # Backward a gradient goes from the second layout to the first.
                (sizes[back], sizes[not back], act, 0 if sent is None else sent.scale * sizes[0])
            )
        before, after, acts, moved = zip(*each, strict=True)
        # A part of a gradient's sum is copied at the chain's end, as it would keep the whole sum.
        cut = back and number == 0 and sent is None and after < before
        steps.append(
            FlatStep(
                kind=sent.collective if sent is not None and over.degree > 1 else "",
                axes=over.axes,
                nbytes=sum(moved),
                before=before,
                after=after,
                made=tuple(act.made or cut for act in acts),
                dealt=tuple(act.scratch > 0 for act in acts),
            )
        )
    return steps


class Moving:
    """A chain under way: it stands still while a collective has to be waited for."""

    def __init__(self, moving: Iterator[None]) -> None:
        self._moving = moving
        self.go_on()

    def go_on(self) -> None:
        """Wait for the collective under way and issue the next one, if there is another."""
        next(self._moving, None)

    def finish(self) -> None:
        """Wait for all collectives of the chain."""
        for _ in self._moving:
            pass


Carried = Generator[None, None, list[int]]
"""Gives whenever a collective is under way; at the end the memories of the tensors."""
Rooms = Callable[[], list[int]]
"""Makes the memories in which tensors are to be at the end of a chain."""


def carried(
    at: LiveBytes, held: list[int], steps: Sequence[FlatStep], rooms: Rooms | None = None
) -> Carried:
    """Take the memories of tensors along the steps.

    `rooms`: where they are to be at the end, if not in new memory.
    """
    for number, step in enumerate(steps):
        for memory in held:
            at.read(memory)
        if step.kind:
            into = rooms if number == len(steps) - 1 else None
            held = yield from _sent(at, held, step, into)
            if into:
                return held
        else:
            held = [
                at.new(size) if made else memory
                for memory, made, size in zip(held, step.made, step.after, strict=True)
            ]
    for memory in held if rooms else ():
        at.read(memory)
    return rooms() if rooms else held


def _sent(at: LiveBytes, held: list[int], step: FlatStep, into: Rooms | None) -> Carried:
    """Play one collective; its inputs are free once the message is made."""
    if step.kind == "all_reduce":
        sums = [at.new(size, BUFFER) for size in step.after]
        yield
        return sums
    # A gather's inputs are joined in any case; a single contiguous tensor is its own message.
    gathers = step.kind == "all_gather"
    alone = len(held) == 1
    if not gathers and not alone:
        at.new(math.fsum(itertools.compress(step.before, step.dealt)), BUFFER)
    message = (
        held[0]
        if alone and not gathers and not step.dealt[0]
        else at.new(math.fsum(step.before), BUFFER)
    )
    if step.kind == "reduce_scatter":
        shards = [at.new(size, BUFFER) for size in step.after]
        yield
        at.read(message)
        return shards
    out = at.new(math.fsum(step.after), BUFFER)
    yield
    at.read(message)
    at.read(out)
    if into:
        return into()
    return [out] if not step.copied else [at.new(size) for size in step.after]
