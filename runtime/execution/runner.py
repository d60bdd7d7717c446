"""The runner, which executes the order of a step on this rank's stages, action by action.

One micro-batch without stages is the smallest case. There the forward pass runs when the module is
called, and the rest of the order in the loss's backward pass. Otherwise passes of micro-batches
alternate, so the whole order runs at the call, and the gradients wait until the loss's backward
pass asks for them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from autopar.order.actions import Action, Word
from autopar.order.scheduled import Mode
from autopar.runtime.random_numbers.draw_state import Draws
from autopar.runtime.ranks.current_action import at, named, record

from .stage import Passing, Stage
from .tied_parameters import TiedSums
from .transfers import Arriving, Edge

BACKWARD = (Word.BACKWARD, Word.BACKWARD_INPUT, Word.BACKWARD_WEIGHT)
COMPUTING = (Word.FORWARD, *BACKWARD)
OF_UNITS = (Word.GATHER, Word.RELEASE, Word.REDUCE)
RECEIVES = (Word.RECEIVE_FORWARD, Word.RECEIVE_BACKWARD)
MESSAGES = (Word.SEND_FORWARD, Word.SEND_BACKWARD, *RECEIVES)

_Pass = tuple[Word, int, int | None]
"""The word of a pass, its chunk and micro-batch."""


class Call:
    """One call of the module on this rank's stages."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        edges: Mapping[tuple[int, int], Edge],
        tied: TiedSums,
        whole: Mapping[str, Tensor],
        *,
        keep: bool,
        draws: Draws,
    ) -> None:
        self.stages = stages
        self.edges = edges
        self._tied = tied
        self.passings: dict[int, Passing] = {
            number: stage.begin(whole, keep=keep, draws=draws) for number, stage in stages.items()
        }
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        self._coming: dict[Action, list[Arriving]] = {}
        self._passes: frozenset[_Pass] = frozenset()

    def run(self, actions: Iterable[Action], *, keep: bool = False, summed: bool = True) -> None:
        """Execute actions in order.

        `keep`: the backward pass may run once more. `summed`: gradients are reduced; otherwise they
        wait as shares.
        """
        ahead = tuple(actions)
        ends = {_pass_of(a): number for number, a in enumerate(ahead) if a.word in COMPUTING}
        try:
            for number, action in enumerate(ahead):
                record(action)
                if action.word in COMPUTING and _pass_of(action) not in self._passes:
                    self._expect(itertools.islice(ahead, number, None), number, ends)
                with at(action), named(action):
                    self._do(action, keep=keep, summed=summed)
            self._settle()
        except BaseException:
            # The next call must not meet gathers and reductions of this one.
            for stage in self.stages.values():
                stage.units.forget()
            raise

    def _settle(self) -> None:
        """Wait for everything under way except gathers."""
        for stage in self.stages.values():
            stage.units.settle()
        while self._sent:
            # The memory of a message is free for others only once the message has gone.
            self._sent.popleft()[0].wait()

    def _do(self, action: Action, *, keep: bool, summed: bool) -> None:
        if action.word is Word.SUM_TIED:
            if summed:
                # What is summed over the stages are this stage's sums, which must have come.
                self._settle()
                self._tied.sum({n: passing.gradients for n, passing in self.passings.items()})
        elif action.word in COMPUTING:
            self._compute(action, keep=keep)
        elif action.word in OF_UNITS:
            self._unit(action, summed=summed)
        elif action.word in MESSAGES:
            self._message(action, self.passings[action.chunk], action.micro_batch or 0)
        else:
            raise AssertionError(action)

    def _compute(self, action: Action, *, keep: bool) -> None:
        stage = self.stages[action.chunk]
        passing = self.passings[action.chunk]
        index = action.micro_batch or 0
        segment = action.segment or 0
        match action.word:
            case Word.FORWARD:
                stage.forward(passing, index, segment)
                if segment == len(stage.plan.segments) - 1:
                    self._hand_on(action.chunk, index)
            case Word.BACKWARD | Word.BACKWARD_INPUT:
                later = action.word is Word.BACKWARD_INPUT
                stage.backward(passing, index, segment, keep=keep, later=later)
                if segment == 0:
                    self._hand_back(action.chunk, index)
            case _:
                stage.weights(passing, index, segment)

    def _unit(self, action: Action, *, summed: bool) -> None:
        assert action.unit is not None
        stage = self.stages[action.chunk]
        if action.word is Word.GATHER:
            assert action.round is not None
            stage.units.gather(action.unit, action.round)
            return
        if action.word is Word.RELEASE:
            stage.units.release(action.unit)
            return
        # Gradients add up over the micro-batches on this rank; the last one's action sums them
        # over the ranks. Units in mode once have nothing to do before.
        assert action.round is not None and action.micro_batch is not None
        last = summed and action.micro_batch == stage.count - 1
        if last or stage.units.units[action.unit].mode is not Mode.ONCE:
            gradients = self.passings[action.chunk].gradients
            stage.units.reduce(action.unit, action.round, action.micro_batch, gradients, last=last)

    # --- between stages ---

    def _edge(self, action: Action) -> Edge:
        assert action.peer is not None
        return self.edges[min(action.chunk, action.peer), max(action.chunk, action.peer)]

    def _expect(self, actions: Iterable[Action], number: int, ends: Mapping[_Pass, int]) -> None:
        """Begin to receive up to the next pass, so that messages come while this one computes.

        `actions`: from the first visit of a pass on, which is action `number`. `ends`: the last
        visits of all passes. Passes that take turns are one: behind their last visit a message
        would be late.
        """
        present = set[_Pass]()
        last = number
        for place, action in enumerate(actions, number):
            if action.word in COMPUTING:
                if place > last:
                    break
                present.add(_pass_of(action))
                last = max(last, ends[_pass_of(action)])
            elif action.word in RECEIVES:
                self._coming[action] = self._begin_receive(action)
        self._passes = frozenset(present)

    def _begin_receive(self, action: Action) -> list[Arriving]:
        return self._edge(action).begin_receive(forward=action.word is Word.RECEIVE_FORWARD)

    def _received(self, action: Action) -> list[Tensor]:
        """The values of a receive, which has begun, or begins now in front of the first pass."""
        messages = self._coming.pop(action, None) or self._begin_receive(action)
        return self._edge(action).receive(messages, forward=action.word is Word.RECEIVE_FORWARD)

    def _message(self, action: Action, passing: Passing, index: int) -> None:
        edge = self._edge(action)
        # Messages that have gone free their memory; nobody waits for the others here.
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        match action.word:
            case Word.SEND_FORWARD:
                assert edge.out is not None
                values = [passing.values[index][place] for place in edge.out.places]
                # Sends do not wait: two neighbours that send to each other first would hang.
                edge.send(values, forward=True, under_way=self._sent)
            case Word.RECEIVE_FORWARD:
                assert edge.into is not None
                arrived = zip(edge.into.places, self._received(action), strict=True)
                passing.values.setdefault(index, {}).update(arrived)
            case Word.SEND_BACKWARD:
                gradients = edge.gradients_of(passing.behind.setdefault(index, {}))
                edge.send(gradients, forward=False, under_way=self._sent)
            case _:
                passing.returned(index, edge.gradient_places(), self._received(action))

    def _hand_on(self, chunk: int, index: int) -> None:
        """Give values to chunks of the same stage, which get no message."""
        for (source, target), edge in self.edges.items():
            if source == chunk and edge.near:
                assert edge.out is not None and edge.into is not None
                values = self.passings[chunk].values[index]
                arrived = self.passings[target].values.setdefault(index, {})
                for here, there in zip(edge.out.places, edge.into.places, strict=True):
                    arrived[there] = values[here]

    def _hand_back(self, chunk: int, index: int) -> None:
        """Give gradients to chunks of the same stage."""
        for (source, target), edge in self.edges.items():
            if target == chunk and edge.near:
                gradients = edge.gradients_of(self.passings[chunk].behind.setdefault(index, {}))
                self.passings[source].returned(index, edge.gradient_places(), gradients)


def _pass_of(visit: Action) -> _Pass:
    return visit.word, visit.chunk, visit.micro_batch


def before_backward(actions: Sequence[Action]) -> int:
    """The index in the order at which the backward pass begins."""
    return next(
        (number for number, action in enumerate(actions) if action.word in BACKWARD), len(actions)
    )
