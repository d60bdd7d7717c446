"""The runner: executes the order of a step on the stages that this rank holds, action by action.

One micro-batch without stages is the smallest case. There the forward pass runs when the module is called, and the rest
of the order in the loss's backward pass. Otherwise passes of micro-batches alternate, so the whole order runs at the
call, and the gradients wait until the loss's backward pass asks for them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from autopar.order.actions import Action, Word
from autopar.order.scheduled import Mode

from .current_action import PRESENT, at, named
from .draws import Draws
from .stage import Passing, Stage
from .tied import TiedSums
from .transfers import Edge

BACKWARD = (Word.BACKWARD, Word.BACKWARD_INPUT, Word.BACKWARD_WEIGHT)


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
        self.stages, self.edges, self._tied = stages, edges, tied
        self.passings: dict[int, Passing] = {number: stage.begin(whole, keep=keep, draws=draws) for number, stage in stages.items()}
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()

    def run(self, actions: Iterable[Action], *, keep: bool = False, summed: bool = True) -> None:
        """Execute actions in order; an error leaves nothing under way.

        `keep`: the backward pass may run once more. `summed`: gradients are reduced; otherwise they wait as shares.
        """
        try:
            for action in actions:
                if PRESENT.log is not None:
                    PRESENT.log.append(action)
                with at(action), named(action):
                    self._do(action, keep=keep, summed=summed)
            self._settle()
        except BaseException:
            for stage in self.stages.values():
                stage.units.forget()
            raise

    def _settle(self) -> None:
        """Wait for everything under way except gathers."""
        for stage in self.stages.values():
            stage.units.settle()
        while self._sent:
            self._sent.popleft()[0].wait()

    def _do(self, action: Action, *, keep: bool, summed: bool) -> None:
        if action.word is Word.SUM_TIED:
            if summed:
                self._settle()
                self._tied.sum({number: one.gradients for number, one in self.passings.items()})
            return
        stage, passing = self.stages[action.chunk], self.passings[action.chunk]
        index, segment = action.micro_batch or 0, action.segment or 0
        match action.word:
            case Word.FORWARD:
                stage.forward(passing, index, segment)
                if segment == len(stage.plan.segments) - 1:
                    self._hand_on(action.chunk, index)
            case Word.BACKWARD | Word.BACKWARD_INPUT:
                stage.backward(passing, index, segment, keep=keep, later=action.word is Word.BACKWARD_INPUT)
                if segment == 0:
                    self._hand_back(action.chunk, index)
            case Word.BACKWARD_WEIGHT:
                stage.weights(passing, index, segment)
            case Word.GATHER | Word.RELEASE | Word.REDUCE:
                assert action.unit is not None
                self._unit(action.word, stage, passing, action.unit, last=summed and index == stage.count - 1)
            case Word.SEND_FORWARD | Word.RECEIVE_FORWARD | Word.SEND_BACKWARD | Word.RECEIVE_BACKWARD:
                self._message(action, passing, index)
            case _:
                raise AssertionError(action)

    def _unit(self, word: Word, stage: Stage, passing: Passing, unit: int, *, last: bool) -> None:
        if word is Word.GATHER:
            stage.units.gather(unit)
        elif word is Word.RELEASE:
            stage.units.release(unit)
        elif last or stage.units.units[unit].mode is not Mode.ONCE:
            stage.units.reduce(unit, passing.gradients, last=last)

    # --- between stages ---

    def _message(self, action: Action, passing: Passing, index: int) -> None:
        assert action.peer is not None
        edge = self.edges[min(action.chunk, action.peer), max(action.chunk, action.peer)]
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        match action.word:
            case Word.SEND_FORWARD:
                assert edge.out is not None
                edge.send([passing.values[index][place] for place in edge.out.places], forward=True, under_way=self._sent)
            case Word.RECEIVE_FORWARD:
                assert edge.into is not None
                passing.values.setdefault(index, {}).update(zip(edge.into.places, edge.receive(forward=True), strict=True))
            case Word.SEND_BACKWARD:
                gradients = edge.gradients_of(passing.behind.setdefault(index, {}))
                edge.send(gradients, forward=False, under_way=self._sent)
            case _:
                passing.returned(index, edge.gradient_places(), edge.receive(forward=False))

    def _hand_on(self, chunk: int, index: int) -> None:
        """Values for chunks of the same stage."""
        for (source, target), edge in self.edges.items():
            if source == chunk and edge.near:
                assert edge.out is not None and edge.into is not None
                values = self.passings[chunk].values[index]
                arrived = self.passings[target].values.setdefault(index, {})
                arrived.update((there, values[here]) for here, there in zip(edge.out.places, edge.into.places, strict=True))

    def _hand_back(self, chunk: int, index: int) -> None:
        """Gradients for chunks of the same stage."""
        for (source, target), edge in self.edges.items():
            if target == chunk and edge.near:
                gradients = edge.gradients_of(self.passings[chunk].behind.setdefault(index, {}))
                self.passings[source].returned(index, edge.gradient_places(), gradients)


def before_backward(actions: Sequence[Action]) -> int:
    """The index in the order at which the backward pass begins."""
    return next((number for number, action in enumerate(actions) if action.word in BACKWARD), len(actions))
