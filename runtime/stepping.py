"""A call of the engine as one node of the caller's autograd graph, from the parameters to the outputs.

Its backward pass gives the parameters' gradients, summed over the ranks. So everything that a caller does with
parameters and gradients works as usual: hooks, `torch.autograd.grad`, replaced tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autopar.errors import PlanError

from .draws import Draws
from .engine import Engine
from .parameters import local_of
from .runner import Call
from .uncompiled import runs_as_it_is
from .units import Gradients

if TYPE_CHECKING:
    from .module import ParallelModule

Shares = dict[int, Gradients]


class Pending:
    """Gradient shares of backward passes under `no_sync`, by chunk; they belong to the then present gradients."""

    def __init__(self) -> None:
        self.shares: Shares = {}
        self._marks: dict[str, tuple[Tensor, int]] = {}

    def clear(self) -> None:
        """Drop all."""
        self.shares, self._marks = {}, {}

    def keep(self, shares: Shares) -> None:
        """Add the shares of a backward pass."""
        for number, more in shares.items():
            if number in self.shares:
                self.shares[number].join(more)
            else:
                self.shares[number] = more

    def mark(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Remember the present gradients of the parameters, to detect whether the caller resets them."""
        held = ((name, local_of(p.grad)) for name, p in parameters.items() if p.grad is not None)
        self._marks = {name: (value, value._version) for name, value in held}

    def current(self, parameters: Mapping[str, nn.Parameter]) -> Shares:
        """The shares, without those of parameters whose gradient has been reset since; they are taken away."""
        for name, (value, version) in self._marks.items():
            gradient = parameters[name].grad
            if gradient is None or local_of(gradient)._version != version or local_of(gradient).data_ptr() != value.data_ptr():
                for shares in self.shares.values():
                    shares.drop(name)
        found, self.shares = self.shares, {}
        self._marks = {}
        return found if any(shares.at for shares in found.values()) else {}


class _Record:
    """A call before its backward pass in autograd; `call_is_over`: its order has already run to the end."""

    call_is_over: bool

    def __init__(self, module: ParallelModule, engine: Engine, call: Call, wanted: Sequence[int], trained: Sequence[str]) -> None:
        self.module, self.engine, self.call, self.wanted, self.trained = module, engine, call, wanted, trained
        self.outputs = [engine.output(call, place) for place in wanted]
        at_once = engine.gives_gradients_at_once
        self.flows = [v.is_floating_point() and (not at_once or p == engine.loss) for v, p in zip(self.outputs, wanted, strict=True)]
        self.versions = {name: engine.stored(name)._version for name in trained}
        self.held = {number: set(stage.units.held) for number, stage in engine.stages.items()}

    @runs_as_it_is
    def gradients(self, upstream: Sequence[Tensor | None], *, keep: bool) -> list[Tensor | None]:
        """The gradients of the trained parameters, from the gradients of the outputs."""
        module, engine = self.module, self.engine
        changed = [name for name, version in self.versions.items() if engine.stored(name)._version != version]
        if changed:
            raise RuntimeError(f"parameter {changed[0]!r} has been changed between the forward and the backward pass that needs it")
        shares = self._shares(upstream, keep=keep)
        again = keep and self.call_is_over  # the gradients found are returned once more
        self._kept = {number: passing.gradients.copied() for number, passing in self.call.passings.items() if again}
        if shares is None:
            found = engine.home({number: passing.gradients for number, passing in self.call.passings.items()})
            before = module._pending.current(module.graph_parameters()) if module._synchronize else {}
            if before:  # shares of later calls
                engine.flush(before)
                found |= {name: found[name] + more if name in found else more for name, more in engine.home(before).items()}
            return self._reset([self._given(name, found) for name in self.trained])
        if module._synchronize:
            before = module._pending.current(module.graph_parameters())
            for number, more in before.items():
                shares[number].join(more)
            engine.flush(shares)
            found = engine.home(shares)
            return self._reset([self._given(name, found) for name in self.trained])
        reached = set().union(*(one.reached for one in shares.values()))
        module._pending.keep(shares)
        torch.autograd.Variable._execution_engine.queue_callback(lambda: module._pending.mark(module.graph_parameters()))
        zeros = {name: torch.zeros_like(engine.stored(name)) for name in self.trained if name in reached}
        return self._reset([self._given(name, zeros) for name in self.trained])

    def _shares(self, upstream: Sequence[Tensor | None], *, keep: bool) -> Shares | None:
        """Run the backward pass; the shares where they are not summed yet."""
        raise NotImplementedError

    def _given(self, name: str, found: Mapping[str, Tensor]) -> Tensor | None:
        if name in found:
            return self.engine.described(name, found[name])
        return None

    def _reset(self, found: list[Tensor | None]) -> list[Tensor | None]:
        """Make ready for another backward pass, if one may come."""
        for number, passing in self.call.passings.items():
            passing.gradients = self._kept.get(number, Gradients())
            passing.behind.clear()
        return found


class _Later(_Record):
    """A call whose order has stopped before its first backward pass."""

    call_is_over = False

    def _shares(self, upstream: Sequence[Tensor | None], *, keep: bool) -> Shares | None:
        engine, call = self.engine, self.call
        summed = self.module._synchronize and not self.module._pending.shares
        for number, stage in engine.stages.items():
            for unit in sorted(self.held[number] - stage.units.held):
                stage.units.gather(unit)  # another call has let it go
        if not engine.stages:
            return None  # an idle rank
        (stage,), (passing,) = engine.stages.values(), call.passings.values()
        arrived = passing.behind.setdefault(0, {})
        for place, gradient in zip(self.wanted, upstream, strict=True):
            if gradient is not None:
                at = stage.first.output_places[place]
                arrived[at] = gradient if at not in arrived else arrived[at] + gradient
        call.run(engine.training_order[engine.backward_begins :], keep=keep, summed=summed)
        return None if summed else {number: one.gradients for number, one in call.passings.items()}


class _AtOnce(_Record):
    """A call whose order has run to its end with a guessed gradient of the loss: that of the call before.

    For another gradient the results are rescaled. Float16 gradients may have lost bits by the guess, so the order runs
    again.
    """

    call_is_over = True

    def __init__(
        self,
        module: ParallelModule,
        engine: Engine,
        whole: Mapping[str, Tensor],
        wanted: Sequence[int],
        trained: Sequence[str],
        draws: Draws,
    ) -> None:
        self.whole, self.draws, self.guess = whole if engine.is_half else None, draws, engine.loss_gradient
        self.summed = module._synchronize and not module._pending.shares
        super().__init__(module, engine, self._run(engine, whole), wanted, trained)

    def _run(self, engine: Engine, whole: Mapping[str, Tensor]) -> Call:
        call = engine.begin(whole, keep=True, draws=self.draws)
        engine.begin_backward(call, self.guess)
        call.run(engine.training_order, summed=self.summed)
        for passing in call.passings.values():
            passing.values.clear()
            passing.behind.clear()
        return call

    def _shares(self, upstream: Sequence[Tensor | None], *, keep: bool) -> Shares | None:
        (given,) = (g for place, g in zip(self.wanted, upstream, strict=True) if place == self.engine.loss) if upstream else (None,)
        gradient = 0.0 if given is None else float(given)
        if gradient != self.guess:
            usual = math.isfinite(gradient) and gradient != 0.0  # the next call's guess
            self.engine.loss_gradient = gradient if usual else 1.0
            if self.whole is not None and usual:
                self.guess = gradient
                self.call = self._run(self.engine, self.whole)
            else:
                for passing in self.call.passings.values():
                    passing.gradients.scale(gradient / self.guess)
                self.guess = gradient if usual else self.guess
        shares = {number: passing.gradients for number, passing in self.call.passings.items()}
        return None if self.summed else shares


class _Node(torch.autograd.Function):
    """The outputs of a call; their gradients reach the trained parameters through the order's backward passes."""

    @staticmethod
    def forward(ctx: Any, record: _Record, anchor: Tensor, *trained: Tensor) -> tuple[Tensor, ...]:
        ctx.record = record
        outputs = tuple(value.view_as(value) for value in record.outputs)
        ctx.mark_non_differentiable(*(value for value, flows in zip(outputs, record.flows, strict=True) if not flows))
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise PlanError("a plan has first derivatives only: gradients cannot be differentiated again (create_graph=True)")
        record: _Record = ctx.record
        if record is not None and record.module.other_stages is not None:
            look, module = record.module.other_stages.look, record.module
            torch.autograd.Variable._execution_engine.queue_callback(lambda: look(module))
        keep: bool = torch._C._autograd._get_current_graph_task_keep_graph()
        if not keep:
            ctx.record = None
        if record is None:
            raise RuntimeError("this call has run its backward pass; to run it again, keep the graph (retain_graph=True)")
        return (None, None, *record.gradients(upstream, keep=keep))


def differentiable_call(
    module: ParallelModule, engine: Engine, whole: Mapping[str, Tensor], wanted: Sequence[int]
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """The outputs at the places `wanted` and new values of constants, from whole inputs and constants.

    Where autograd is on and the plan is for training, the outputs lead to the gradients of the parameters.
    """
    parameters = {name: p for name, p in module.graph_parameters().items() if p.requires_grad}
    # With stages all ranks run one order, whichever parameters each has to train.
    keep = torch.is_grad_enabled() and engine.trains and (engine.world.staged or bool(parameters))
    draws = engine.draws()
    if not keep:
        call = engine.begin(whole, keep=False, draws=draws)
        with torch.no_grad():
            call.run(engine.forward_order)
        return {place: engine.output(call, place) for place in wanted}, engine.updates(call)
    if not engine.gives_gradients_at_once:
        call = engine.begin(whole, keep=True, draws=draws)
        with torch.no_grad():
            call.run(engine.training_order[: engine.backward_begins])
        record: _Record = _Later(module, engine, call, wanted, list(parameters))
    else:
        places = list(dict.fromkeys((*wanted, *(() if engine.loss is None else (engine.loss,)))))
        record = _AtOnce(module, engine, whole, places, list(parameters), draws)
        wanted, call = places, record.call
    found: tuple[Tensor, ...] = _Node.apply(record, module._anchor, *parameters.values())  # type: ignore[no-untyped-call]
    return dict(zip(wanted, found, strict=True)), engine.updates(call)
