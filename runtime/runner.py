"""The runner: executes the order of a step on the stages that this rank holds, action by action.

One micro-batch without stages is the smallest case of it. There the forward pass runs when the module is called, and the rest of the
order when the loss is asked for its gradient. Otherwise passes of micro-batches alternate, so all of the order runs at the call; the
gradients wait until the loss's own backward pass asks for them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from autopar.order.actions import Action, Word
from autopar.order.scheduled import Mode

from .draws import Draws
from .stage import Passing, Stage

BACKWARD = (Word.BACKWARD, Word.BACKWARD_INPUT, Word.BACKWARD_WEIGHT)


class Present(threading.local):
    """What the runner of this thread is doing, for those who watch: the action, and the log of actions where one is kept."""

    action: Action | None = None
    log: list[Action] | None = None


PRESENT = Present()


class Call:
    """One call of the module on this rank's stages."""

    def __init__(self, stages: Mapping[int, Stage], whole: Mapping[str, Tensor], *, keep: bool, draws: Draws) -> None:
        self.stages = stages
        self.passings: dict[int, Passing] = {number: stage.begin(whole, keep=keep, draws=draws) for number, stage in stages.items()}

    def run(self, actions: Iterable[Action], *, keep: bool = False, summed: bool = True) -> None:
        """Execute actions in their order; what breaks off leaves nothing under way.

        `keep`: the backward pass may run once more. `summed`: gradients are brought home; otherwise they wait as shares.
        """
        try:
            for action in actions:
                PRESENT.action = action
                if PRESENT.log is not None:
                    PRESENT.log.append(action)
                self._do(action, keep=keep, summed=summed)
            for stage in self.stages.values():
                stage.units.settle()
        except BaseException:
            for stage in self.stages.values():
                stage.units.forget()
            raise
        finally:
            PRESENT.action = None

    def _do(self, action: Action, *, keep: bool, summed: bool) -> None:
        stage = self.stages[action.chunk]
        passing = self.passings[action.chunk]
        index, segment = action.micro_batch or 0, action.segment or 0
        match action.word:
            case Word.FORWARD:
                stage.forward(passing, index, segment)
            case Word.BACKWARD:
                stage.backward(passing, index, segment, keep=keep)
            case Word.GATHER:
                assert action.unit is not None
                stage.units.gather(action.unit)
            case Word.RELEASE:
                assert action.unit is not None
                stage.units.release(action.unit)
            case Word.REDUCE:
                assert action.unit is not None
                last = summed and index == stage.count - 1
                if last or stage.units.units[action.unit].mode is not Mode.ONCE:
                    stage.units.reduce(action.unit, passing.gradients, last=last)
            case _:
                raise AssertionError(action)


def before_backward(actions: Sequence[Action]) -> int:
    """Where the backward pass begins in the order."""
    return next((number for number, action in enumerate(actions) if action.word in BACKWARD), len(actions))
