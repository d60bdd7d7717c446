"""Batches that come in parts: each rank of a stage is given its own part of a call's batch.

Inputs that a stage reads in other parts are gathered before the program begins, so that it runs as
planned.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from autopar.errors import PlanError
from autopar.ir import Graph
from autopar.order.part_gathers import batch_of, comes_in_parts, gathered_inputs
from autopar.runtime.execution.engine import Engine
from autopar.runtime.ranks.collectives import all_gather
from autopar.runtime.ranks.current_action import exchanging
from autopar.runtime.ranks.device_groups import DeviceGroups
from autopar.runtime.ranks.world import World


class BatchParts:
    """Assembles a stage's inputs from its ranks' parts of the batch."""

    def __init__(self, graph: Graph, world: World) -> None:
        if world.groups is None:
            raise PlanError(
                "a rank that the plan leaves idle has no part of a batch; give every rank all of "
                "it (full_batch=True)"
            )
        self.groups: DeviceGroups = world.groups
        self.count = self.groups.mesh.devices
        self.first = self.groups.first
        self.batch = batch_of(graph)
        if self.batch % self.count:
            raise PlanError(
                f"a batch of {self.batch} does not divide into {self.count} equal parts; "
                "plan with one that does"
            )
        self.shapes = {
            name: (self.batch // self.count, *graph.tensors[name].shape[1:])
            for name in graph.inputs
            if self.count > 1 and comes_in_parts(graph, name)
        }
        """The shape of one part of each input that comes in parts."""
        self._gathered: dict[Engine, frozenset[str]] = {}

    def joined(self, inputs: Mapping[str, Tensor], engine: Engine) -> dict[str, Tensor]:
        """The inputs whole; the rest is uninitialised where the program reads only our part."""
        if engine not in self._gathered:
            stage = engine.world.stage
            assert stage is not None
            self._gathered[engine] = frozenset(gathered_inputs(engine.execution, stage))
        whole = dict(inputs)
        for name in self.shapes:
            # Collectives need gathered inputs on the device; the program itself moves inputs that
            # it reads alone.
            if name in self._gathered[engine]:
                whole[name] = self._whole(inputs[name].to(engine.device))
            else:
                whole[name] = self._placed(inputs[name])
        return whole

    def _whole(self, value: Tensor) -> Tensor:
        """The parts of all ranks, one behind the other."""
        out = value.detach()
        with exchanging("batch"):
            # Ranks are numbered along the last axis first: its parts are neighbours.
            for group in reversed(self.groups.axes):
                if group.size > 1:
                    out = all_gather(out, 0, 1, group)
        return out

    def _placed(self, value: Tensor) -> Tensor:
        """The whole tensor with only this rank's part filled in."""
        out = torch.empty(self.batch, *value.shape[1:], dtype=value.dtype, device=value.device)
        out.chunk(self.count)[self.groups.rank - self.first].copy_(value.detach())
        return out
