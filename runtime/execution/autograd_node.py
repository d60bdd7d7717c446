"""A call of the engine as one node of the caller's autograd graph, from parameters to outputs.

Its backward pass gives the parameters' gradients, summed over the ranks. So everything that a
caller does with parameters and gradients works as usual: hooks, `torch.autograd.grad`, replaced
tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from autopar.errors import PlanError
from autopar.runtime.parameters.gradients import Gradients
from autopar.runtime.random_numbers.draw_state import Draws
from autopar.runtime.ranks.uncompiled import runs_as_it_is

from .engine import Engine
from .gradient_state import GradientState, Shares
from .loss_gradients import UnreadLoss, is_known_one, is_on_host
from .runner import Call


class CallingModule(Protocol):
    """The planned module, as far as a call must know it."""

    gradient_state: GradientState

    def graph_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by their names in the graph."""

    def gradients_are_reduced(self) -> None:
        """Called at the end of a backward pass, when the parameters have their gradients."""


class _Record:
    """A call before its backward pass in autograd.

    `call_is_over`: its order has already run to the end.
    """

    call_is_over: bool

    def __init__(
        self,
        module: CallingModule,
        engine: Engine,
        call: Call,
        wanted: Sequence[int],
        trained: Sequence[str],
    ) -> None:
        self.module = module
        self.engine = engine
        self.call = call
        self.wanted = wanted
        self.trained = trained
        self.outputs = [engine.output(call, place) for place in wanted]
        self.flows = [value.is_floating_point() for value in self.outputs]
        # Reading the gradient of such a loss would make the host wait for the device.
        self.unread = [
            engine.gives_gradients_at_once and place == engine.loss and not is_on_host(value)
            for value, place in zip(self.outputs, wanted, strict=True)
        ]
        # Autograd notices a change of a tensor that it has saved, but not of the shard behind a
        # gathered copy.
        self.versions = {name: engine.stored(name)._version for name in trained}
        self.held = {number: set(stage.units.held) for number, stage in engine.stages.items()}

    @runs_as_it_is
    def gradients(self, upstream: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """The gradients of the trained parameters, from the gradients of the outputs."""
        self._require_unchanged()
        state = self.module.gradient_state
        shares = self._shares(upstream, keep=keep)
        # Reduction works in place: gradients that are to be returned once more need a copy.
        saved = self._copies() if keep and self.call_is_over else {}
        if shares is None:
            gradients = self._with_pending(self.engine.home(self._gradients_of_call()))
        elif state.synchronize:
            for number, more in state.pending.current(self.module.graph_parameters()).items():
                shares[number].join(more)
            self.engine.flush(shares)
            gradients = self.engine.home(shares)
        else:
            gradients = self._set_aside(shares)
        self._make_ready(saved)
        return [self._described(name, gradients.get(name)) for name in self.trained]

    def require_taken(self, upstream: Sequence[Tensor | None]) -> None:
        """Refuse a gradient of an output that the backward pass does not take."""
        engine = self.engine
        if engine.loss is None:
            return
        loss = engine.outputs[engine.loss][0]
        for place, gradient in zip(self.wanted, upstream, strict=True):
            name = engine.outputs[place][0]
            if gradient is None or place == engine.loss:
                continue
            if engine.gives_gradients_at_once:
                why = f"comes too late: {engine.in_words} each have run their backward pass"
            elif name in engine.without_way_back:
                why = "does not lead to it"
            else:
                continue
            raise PlanError(
                f"output {name!r} has a gradient, which the program does not take: its loss is "
                f"{loss!r}, and this output {why}. Let the model return the whole loss as its "
                "first scalar, or give autopar.plan and parallelize a loss (loss=...)"
            )

    def _shares(self, upstream: Sequence[Tensor | None], *, keep: bool) -> Shares | None:
        """Run the backward pass; the shares if they are not summed yet, else None."""
        raise NotImplementedError

    def _require_unchanged(self) -> None:
        for name, version in self.versions.items():
            if self.engine.stored(name)._version != version:
                raise RuntimeError(
                    f"parameter {name!r} has been changed between the forward and the backward "
                    "pass that needs it"
                )

    def _gradients_of_call(self) -> Shares:
        return {number: passing.gradients for number, passing in self.call.passings.items()}

    def _copies(self) -> Shares:
        return {number: shares.copied() for number, shares in self._gradients_of_call().items()}

    def _with_pending(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        """Summed gradients, and those of calls under `no_sync` that came between."""
        state = self.module.gradient_state
        if not state.synchronize:
            return gradients
        pending = state.pending.current(self.module.graph_parameters())
        if pending:
            self.engine.flush(pending)
            for name, more in self.engine.home(pending).items():
                gradients[name] = gradients[name] + more if name in gradients else more
        return gradients

    def _set_aside(self, shares: Shares) -> dict[str, Tensor]:
        """Keep shares for a later reduction; zeros stand for their gradients until then."""
        pending = self.module.gradient_state.pending
        reached = set().union(*(share.reached for share in shares.values()))
        pending.keep(shares)
        # Autograd adds the zeros to `.grad` only after this node: the marks are made at the end.
        _at_the_end_of_backward(lambda: pending.mark(self.module.graph_parameters()))
        return {
            name: torch.zeros_like(self.engine.stored(name))
            for name in self.trained
            if name in reached
        }

    def _described(self, name: str, gradient: Tensor | None) -> Tensor | None:
        return None if gradient is None else self.engine.storages.described(name, gradient)

    def _make_ready(self, saved: Shares) -> None:
        """Prepare another backward pass, which comes if the caller keeps the graph."""
        for number, passing in self.call.passings.items():
            passing.gradients = saved.get(number, Gradients())
            passing.behind.clear()


class _Later(_Record):
    """A call whose order has stopped before its first backward pass."""

    call_is_over = False

    def _shares(self, upstream: Sequence[Tensor | None], *, keep: bool) -> Shares | None:
        engine = self.engine
        summed = self.module.gradient_state.sums_at_once
        for number, stage in engine.stages.items():
            # Another call may have released what this call's tape has saved.
            for unit in sorted(self.held[number] - stage.units.held):
                stage.units.gather_whole(unit)
        if not engine.stages:
            return None  # an idle rank
        (stage,) = engine.stages.values()
        (passing,) = self.call.passings.values()
        arrived = passing.behind.setdefault(0, {})
        for place, gradient in zip(self.wanted, upstream, strict=True):
            if gradient is not None:
                at = stage.first.output_places[place]
                # Two outputs may be the same value, whose gradients add up.
                arrived[at] = arrived[at] + gradient if at in arrived else gradient
        backward = engine.training_order[engine.backward_begins :]
        self.call.run(backward, keep=keep, summed=summed)
        return None if summed else self._gradients_of_call()


class _AtOnce(_Record):
    """A call whose order has run to its end with a guessed gradient of the loss.

    The guess is the gradient of the call before. For another gradient the results are rescaled.
    Float16 gradients may have lost bits by the guess, so the order runs again.
    """

    call_is_over = True

    def __init__(
        self,
        module: CallingModule,
        engine: Engine,
        whole: Mapping[str, Tensor],
        wanted: Sequence[int],
        trained: Sequence[str],
        draws: Draws,
    ) -> None:
        # Inputs are kept only where the order may have to run a second time.
        self.whole = whole if engine.is_half else None
        self.draws = draws
        self.guess: float | Tensor = engine.loss_gradient
        self.summed = module.gradient_state.sums_at_once
        super().__init__(module, engine, self._run(engine, whole), wanted, trained)

    def _run(self, engine: Engine, whole: Mapping[str, Tensor]) -> Call:
        call = engine.begin(whole, keep=True, draws=self.draws)
        engine.begin_backward(call, engine.loss_gradient)
        call.run(engine.training_order, summed=self.summed)
        for passing in call.passings.values():
            # Their backward passes are over, so the values need not wait for the caller's.
            passing.values.clear()
            passing.behind.clear()
        return call

    def _shares(self, upstream: Sequence[Tensor | None], *, keep: bool) -> Shares | None:
        gradient = self._gradient_of_loss(upstream)
        if gradient is None:
            self._correct(0.0)
        elif is_known_one(gradient) and isinstance(self.guess, float):
            self._correct(1.0)
        elif self.whole is not None or is_on_host(gradient):
            self._correct(float(gradient))
        else:
            self._correct_unread(gradient.double())
        return None if self.summed else self._gradients_of_call()

    def _gradient_of_loss(self, upstream: Sequence[Tensor | None]) -> Tensor | None:
        for place, gradient in zip(self.wanted, upstream, strict=True) if upstream else ():
            if place == self.engine.loss:
                return gradient
        return None

    def _correct(self, gradient: float) -> None:
        """Turn the results for the guess into those for the actual gradient of the loss."""
        if gradient == self.guess:
            return
        usual = math.isfinite(gradient) and gradient != 0.0
        # Zero, infinity and NaN are no guess for the next call: one could not rescale from them.
        self.engine.loss_gradient = gradient if usual else 1.0
        if self.whole is not None and usual:
            self.guess = gradient
            self.call = self._run(self.engine, self.whole)
            return
        for shares in self._gradients_of_call().values():
            # Gradients are linear in that of the loss, so a factor turns one into the other.
            shares.scale(gradient / self.guess)
        if usual:
            self.guess = gradient

    def _correct_unread(self, gradient: Tensor) -> None:
        """As `_correct`, where the host would wait for the device to read the gradient.

        The factor, which mostly is 1, stays on the device. So the next call's guess does, too.
        """
        for shares in self._gradients_of_call().values():
            shares.scale(gradient / self.guess)
        usual = gradient.isfinite() & (gradient != 0.0)
        self.guess = torch.where(usual, gradient, self.guess)


class _Node(torch.autograd.Function):
    """The outputs of a call; from their gradients the order's backward passes make those of the
    trained parameters.
    """

    @staticmethod
    def forward(ctx: Any, record: _Record, anchor: Tensor, *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.record = record
        # Autograd makes this node the history of the tensors that it returns. Views keep the
        # record's own tensors from referring back to the node that holds the record.
        outputs = tuple(
            value.as_subclass(UnreadLoss) if unread else value.view_as(value)
            for value, unread in zip(record.outputs, record.unread, strict=True)
        )
        fixed = [value for value, flows in zip(outputs, record.flows, strict=True) if not flows]
        ctx.mark_non_differentiable(*fixed)
        # None stands for an output without a gradient; zeros of its shape would take memory.
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        # Autograd enables gradients inside a backward pass only for create_graph=True.
        if torch.is_grad_enabled():
            raise PlanError(
                "a plan has first derivatives only: gradients cannot be differentiated again "
                "(create_graph=True)"
            )
        record: _Record | None = ctx.record
        if record is None:
            raise RuntimeError(
                "this call has run its backward pass; to run it again, keep the graph "
                "(retain_graph=True)"
            )
        _at_the_end_of_backward(record.module.gradients_are_reduced)
        # torch has no public way to ask whether the caller keeps the graph (retain_graph=True).
        keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keep:
            # The node lives as long as the outputs do, but the call's activations need not.
            ctx.record = None
        record.require_taken(upstream)
        return (None, None, *record.gradients(upstream, keep=keep))


def _at_the_end_of_backward(call: Callable[[], None]) -> None:
    """Let autograd make a call when the present backward pass has set all `.grad`."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def differentiable_call(
    module: CallingModule, engine: Engine, whole: Mapping[str, Tensor], wanted: Sequence[int]
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """The outputs at the places `wanted` and new values of constants, from whole inputs and
    constants.

    Where autograd is on and the plan is for training, the outputs lead to the gradients of the
    parameters.
    """
    trained = {name: p for name, p in module.graph_parameters().items() if p.requires_grad}
    # With stages all ranks run one order, whichever parameters each has to train.
    keep = torch.is_grad_enabled() and engine.trains and (engine.world.staged or bool(trained))
    # This broadcasts a seed, so every rank takes part, whether it keeps anything or not.
    draws = engine.draws()
    if not keep:
        call = engine.begin(whole, keep=False, draws=draws)
        with torch.no_grad():
            call.run(engine.forward_order)
        return {place: engine.output(call, place) for place in wanted}, engine.updates(call)
    if engine.gives_gradients_at_once:
        # The loss's gradient decides about all others: it is an output of the node in any case.
        if engine.loss is not None and engine.loss not in wanted:
            wanted = (*wanted, engine.loss)
        record: _Record = _AtOnce(module, engine, whole, wanted, list(trained), draws)
    else:
        call = engine.begin(whole, keep=True, draws=draws)
        with torch.no_grad():
            call.run(engine.training_order[: engine.backward_begins])
        record = _Later(module, engine, call, wanted, list(trained))
    # The constants of this call are updated now; its record may run the order once more later.
    call = record.call
    outputs: tuple[Tensor, ...] = _Node.apply(  # type: ignore[no-untyped-call]
        record, module.gradient_state.anchor, *trained.values()
    )
    return dict(zip(wanted, outputs, strict=True)), engine.updates(call)
