"""Parameters of other stages, as far as a rank must know them: shapes, and figures of gradients.

A rank holds the parameters of its own stage. For each other parameter it has a stand-in, under the
same name. At the end of a backward pass all ranks tell one another the norm and the largest element
of each gradient, so that lists of gradients can be clipped, and steps that overflowed skipped, as
on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.errors import PlanError
from autopar.runtime.execution.engine import Engine
from autopar.runtime.execution.loss_gradients import is_on_host
from autopar.runtime.ranks.collectives import MOVABLE
from autopar.runtime.stand_ins import Elsewhere, Figures, Origin, StandIn, pass_over_stand_ins

from .clipping import Parameters, counted_gradients

pass_over_stand_ins()


class OtherStages:
    """The stages of a module beside this rank's own, for its stand-ins.

    `own`: this rank's parameters. `anchor`: a tensor that every call's outputs depend on.
    """

    def __init__(
        self, engine: Engine, anchor: Tensor, own: Callable[[], dict[str, nn.Parameter]]
    ) -> None:
        self.engine = engine
        self.own = own
        self.anchor = anchor
        self.device = torch.empty(0, device=engine.device).device
        graph = engine.graph
        trained = engine.execution.chunks[0].whole.program.assignment.gradients
        self.rows = {tensor.name: row for row, tensor in enumerate(graph.parameters)}
        # Those that have a gradient if they require one: frozen ones may be unfrozen.
        self.reached = {t.name for t in graph.parameters if t.name in trained or not t.trainable}
        count = engine.execution.stages
        self.stages = {
            tensor.name: frozenset(at % count for at in engine.storages.holders(tensor.name))
            for tensor in graph.parameters
        }
        # Gradients that are only read (torch.autograd.grad) are not those of the parameters.
        self.accumulates = True
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def stand_in(self, name: str) -> nn.Parameter:
        """The stand-in for a parameter."""
        tensor = self.engine.graph.tensors[name]
        dtype = self.engine.storages.dtype_of(name)
        like = torch.empty(tensor.shape, dtype=dtype, device="meta")
        return nn.Parameter(StandIn.of(like, self._origin(name)), requires_grad=tensor.trainable)

    def _origin(self, name: str) -> Origin:
        return Origin(name=name, holders=self, stages=self.stages[name])

    def adopt(self, values: Iterable[Elsewhere]) -> None:
        """Take over the stand-ins of a copied module."""
        for value in values:
            value.origin = self._origin(value.origin.name)

    def wrap(self, value: Tensor) -> Tensor:
        """A value that all ranks have, as one of the tensors that this rank's parameters are.

        Torch's functions over lists want DTensors or plain tensors, not both.
        """
        storages = self.engine.storages
        return storages.replicated(value) if storages.own else value

    # --- figures of gradients ---

    def look(self, parameters: Parameters, stand_ins: Mapping[str, Elsewhere]) -> None:
        """Set the stand-ins' gradients, once all gradients of a backward pass are reduced.

        Collective: every rank calls it.
        """
        figures, present = self._told(parameters)
        if not self.accumulates:
            return
        # The host of another device would wait for the whole backward pass to read this.
        there = present.tolist() if is_on_host(present) else None
        values = figures.unbind()
        with torch._C.DisableTorchFunctionSubclass():
            for name, parameter in stand_ins.items():
                row = self.rows[name]
                if there is None:
                    has = parameter.requires_grad and name in self.reached
                else:
                    has = there[row] > 0
                self._set(parameter, values[row] if has else None)

    def _set(self, parameter: Elsewhere, values: Tensor | None) -> None:
        gradient = parameter.grad
        if values is None:
            parameter.grad = None
        elif isinstance(gradient, Elsewhere) and gradient.whole and gradient.kind == "values":
            # The script may hold this tensor.
            gradient.figures.values = values
            gradient.figures.told = True
        else:
            figures = Figures(values, told=True)
            parameter.grad = StandIn.of(parameter, parameter.origin, figures)

    def _told(self, parameters: Parameters) -> tuple[Tensor, Tensor]:
        """Every gradient's norm and largest element, and the number of ranks that have a part."""
        count = len(self.rows)
        gradients = {
            self.rows[name]: gradient
            for name in parameters
            for gradient in counted_gradients(self.engine, {name: parameters[name]})
        }
        # In double precision: squares of small gradients underflow.
        sums = torch.zeros(2 * count, dtype=torch.double, device=self.device)
        largest = torch.zeros(count, dtype=torch.double, device=self.device)
        if gradients:
            sums[count:][self._index(tuple(gradients))] = 1.0
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients.values()):
            alike = {r: g for r, g in gradients.items() if g.dtype is dtype and g.numel()}
            if alike:
                _write(sums, largest, self._index(tuple(alike)), list(alike.values()))
        dist.all_reduce(sums)
        # A maximum may lose what is not a number; a sum does not.
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        squares = sums[:count]
        largest = torch.where(squares.isnan(), squares, largest)
        return torch.stack([squares.sqrt(), largest], 1), sums[count:]

    def _index(self, rows: tuple[int, ...]) -> Tensor:
        """Rows as an index on the device, made once: it would wait for a copy from the host."""
        if rows not in self._indices:
            self._indices[rows] = torch.tensor(rows, device=self.device)
        return self._indices[rows]

    # --- values ---

    def all_lack_one(self, missing: Sequence[Elsewhere], present: Sequence[Tensor]) -> bool:
        """Whether every rank lacks one of the `missing` values, or of those `present` here.

        Ranks that lack none do not take part in an exchange.
        """
        mine = self.engine.world.stage
        names = {id(t): n for n, p in self.own().items() for t in (p, p.grad) if t is not None}
        names_here = [names.get(id(value)) for value in present]
        unknown = len({id(v) for v, n in zip(present, names_here, strict=True) if n is None})
        for stage in range(self.engine.execution.stages):
            if stage == mine or not all(stage in value.origin.stages for value in missing):
                continue
            # It holds all that this rank lacks. Values here are its own, too, where they are tied.
            shared = {name for name, stages in self.stages.items() if {mine, stage} <= stages}
            alone = any(name is not None and name not in shared for name in names_here)
            if not alone and unknown <= len(shared):
                return False
        return True

    @torch.no_grad()
    def exchanged(self, values: Sequence[Tensor]) -> list[Tensor]:
        """Values of which every rank has some, whole; collective."""
        world = self.engine.world
        mine = [
            None
            if isinstance(value, Elsewhere)
            else (value.full_tensor() if isinstance(value, DTensor) else value).detach()
            for value in values
        ]
        # The first rank that has a value tells it, so that it is exact.
        ranks = [float(world.size if value is None else world.rank) for value in mine]
        teller = torch.tensor(ranks, device=self.device)
        dist.all_reduce(teller, dist.ReduceOp.MIN)
        if is_on_host(teller) and bool((teller == world.size).any()):
            raise PlanError("no rank has a value that is made of tensors of several stages")
        results = []
        for place, (like, value) in enumerate(zip(values, mine, strict=True)):
            dtype = like.dtype if like.dtype in MOVABLE else torch.uint8
            told = torch.zeros(like.shape, dtype=dtype, device=self.device)
            if value is not None:
                told = torch.where(teller[place] == world.rank, value.to(dtype), told)
            results.append(told)
        for dtype in dict.fromkeys(value.dtype for value in results):
            _sum_together([value for value in results if value.dtype is dtype])
        return [r.to(like.dtype) for r, like in zip(results, values, strict=True)]

    def read_gradients(self, outputs: Any, inputs: Sequence[Tensor], **options: Any) -> Any:
        """As `torch.autograd.grad`, also of stand-ins; collective."""
        own = [value for value in inputs if not isinstance(value, Elsewhere)]
        strict = not (options.pop("allow_unused", None) or options.get("materialize_grads"))
        self.accumulates = False
        try:
            with torch._C.DisableTorchFunctionSubclass():
                # By way of the anchor a rank takes part that has none of the parameters.
                made = torch.autograd.grad(
                    outputs, (*own, self.anchor), allow_unused=True, **options
                )
        finally:
            self.accumulates = True
        given = iter(made)
        results: list[Tensor | None] = []
        for value in inputs:
            if not isinstance(value, Elsewhere):
                results.append(next(given))
            elif value.origin.name in self.reached or options.get("materialize_grads"):
                results.append(StandIn.of(value, value.origin, Figures(told=True)))
            else:
                results.append(None)
        if strict and any(result is None for result in results):
            raise RuntimeError(
                "One of the differentiated Tensors appears to not have been used in the graph. "
                "Set allow_unused=True if this is the desired behavior."
            )
        return tuple(results)


def _write(sums: Tensor, largest: Tensor, rows: Tensor, gradients: list[Tensor]) -> None:
    """Write the sums of squares of gradients, and their largest elements, at their rows."""
    # Squares of float16 gradients would overflow.
    wide = torch.promote_types(gradients[0].dtype, torch.float32)
    norms = torch.stack(torch._foreach_norm(gradients, 2.0, dtype=wide))
    sums[rows] = norms.double().square()
    # Both extremes in one pass, several times as fast as the largest absolute value.
    extremes = torch.stack([extreme for value in gradients for extreme in value.aminmax()])
    largest[rows] = (
        extremes.double().abs().view(-1, 2).amax(1).nan_to_num(nan=0.0, posinf=torch.inf)
    )


def _sum_together(values: list[Tensor]) -> None:
    """Sum values over all ranks in one message, in place."""
    joined = torch.cat([value.reshape(-1) for value in values])
    dist.all_reduce(joined)
    parts = torch.split(joined, [value.numel() for value in values])
    for value, part in zip(values, parts, strict=True):
        value.copy_(part.view_as(value))
