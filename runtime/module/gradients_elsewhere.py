"""Gradients of other stages, as far as a rank must know them: their norm, and whether they are all
finite.

A rank holds the parameters of its own stage. Code that looks at all gradients at once, to clip them
by their norm or to skip a step that overflowed, would see only one stage. So `parameters()` of a
module with stages ends with one more parameter. Its gradient has the Euclidean norm, and the
largest element, of all gradients that this stage does not hold. If some of these are not finite,
neither is it, nor one of this rank's own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.order.ranks import tied_parameters
from autopar.runtime.execution.engine import Engine
from autopar.runtime.execution.loss_gradients import is_on_host
from autopar.runtime.parameters.storage import local_of

from .clipping import Parameters, counted_gradients, norms_of

PLACES = 1 << 16
"""Elements of the parameter.

Its gradient has the largest of the others' elements and their Euclidean norm. That norm is right as
long as the largest element is at least the norm divided by the square root of this number.
"""


class OtherStages:
    """The parameter that represents those of other stages.

    `refusal`: the reason why this rank goes on no further than all ranks' next backward pass.
    """

    refusal: PlanError | None = None

    def __init__(self, engine: Engine, parameters: Parameters) -> None:
        # An idle rank has no parameters, and is to see the same norm.
        like = next(iter(parameters.values()), torch.zeros(1, dtype=torch.double))
        value: Tensor = torch.zeros(PLACES, dtype=like.dtype, device=engine.device)
        # torch's functions over lists of gradients want DTensors or plain tensors, not both.
        if isinstance(like, DTensor):
            value = engine.storages.replicated(value)
        self.parameter = nn.Parameter(value)
        # The stages that hold each tied parameter, for every step.
        self.tied = tied_parameters(engine.execution)
        sizes = {tensor.name: tensor.size for tensor in engine.graph.parameters}
        elsewhere = sum(size for name, size in sizes.items() if name not in parameters)
        # Scripts count parameters by adding up `numel()`.
        vars(self.parameter)["numel"] = lambda: elsewhere

    def look(self, engine: Engine, parameters: Parameters) -> None:
        """Set the gradient, once all gradients of a backward pass are reduced.

        Collective: every rank calls it.
        """
        squares, largest, refused = self._others(engine, parameters)
        # The host of another device would wait for the whole backward pass to read this.
        if is_on_host(refused) and refused:
            raise self.refusal or PlanError("ranks of another stage refuse this step, and tell why")
        rest = ((squares - largest**2).clamp(min=0.0) / (PLACES - 1)).sqrt()
        gradient = torch.cat([largest.reshape(1), rest.expand(PLACES - 1)]).to(self.parameter.dtype)
        if isinstance(self.parameter, DTensor):
            gradient = engine.storages.replicated(gradient)
        self.parameter.grad = gradient
        mine = next((p.grad for p in parameters.values() if p.grad is not None), None)
        # A gradient scaler may look at this rank's own parameters alone, and all ranks must skip
        # the same steps.
        if mine is not None:
            # Added on the device: if the host asked, it would wait for the whole backward pass.
            bad = torch.where(squares.sqrt().isfinite(), 0.0, float("nan"))
            local_of(mine).view(-1)[:1] += bad.to(mine.dtype)

    def _others(self, engine: Engine, parameters: Parameters) -> tuple[Tensor, Tensor, Tensor]:
        """The sum of squares, and the largest element, of the gradients that this stage does not
        hold, and how many ranks refuse to go on.
        """
        world = engine.world
        stages = len(world.firsts)
        # Idle ranks have a row of their own behind those of the stages, and so has each tied
        # parameter, which several stages hold.
        here = stages if world.stage is None else world.stage
        rows = {name: stages + 1 + number for number, name in enumerate(self.tied)}
        # Squares and largest elements travel in one sum: every rank writes places of its own.
        each = torch.zeros(
            3, stages + 1 + len(rows), world.size, dtype=torch.double, device=engine.device
        )
        each[2, here, world.rank] = float(self.refusal is not None)
        members: dict[int, dict[str, nn.Parameter]] = {}
        for name, parameter in parameters.items():
            members.setdefault(rows.get(name, here), {})[name] = parameter
        for row, some in members.items():
            _write(each[:, row, world.rank], counted_gradients(engine, some), engine.device)
        # One message for both figures, in double precision: squares of small gradients underflow.
        dist.all_reduce(each)
        refused = each[2].sum()
        own = [here, *(rows[name] for name, holders in self.tied.items() if world.stage in holders)]
        each[:, own] = 0.0
        return each[0].sum(), each[1].max(), refused


def _write(figures: Tensor, gradients: list[Tensor], device: torch.device) -> None:
    """Write the sum of squares of gradients, and their largest element, into the first places."""
    counted = [gradient for gradient in gradients if gradient.numel()]
    if counted:
        figures[0] = norms_of(counted, 2.0, device).square().sum()
        # Both extremes in one pass, several times as fast as the largest absolute value.
        extremes = [extreme.double() for gradient in counted for extreme in gradient.aminmax()]
        figures[1] = torch.stack(extremes).abs().max()
