"""`Framework`: who runs a plan, by what it does on which the plan's seconds and bytes depend.

A cluster has one (`Cluster.framework`), so whatever is priced on it is priced as that framework
runs it: tables, bounds, played programs and all that explains them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from autopar.costmodel.device.host_actions import HOST_ACTIONS
from autopar.sharding.rules.saved_for_backward import TORCH, Saving

from .habits import LOSSES, Habits
from .kernels import Kernels

OWN = "autopar"
"""The name of this project's own runtime, the only one that `autopar calibrate` measures."""
MASTER = 4
"""Bytes of an element of a master weight."""
TORCH_UPDATE = 84.0
"""Bytes of a parameter that AdamW of torch moves: 21 tensors of float32 (`mesh_prices.py`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework: its `habits` and `kernels`.

    `one_rotation`: rotary positions are one kernel. `gathered_logits`, `shared_input`: as in
    `Shape`.
    """

    name: str = ""
    habits: Habits = field(default_factory=Habits)
    kernels: Kernels = field(default_factory=Kernels)
    one_rotation: bool = True
    gathered_logits: bool = False
    shared_input: bool = True

    def but(self, **habits: Any) -> Framework:
        """The framework with other habits."""
        return replace(self, habits=replace(self.habits, **habits))

    @property
    def attention(self) -> str:
        """The kernel of attention in one kernel."""
        return self.kernels.attention if self.kernels.one_kernel else Kernels().attention

    @property
    def update(self) -> float:
        """Bytes that an optimizer's step moves, as a share of those of torch's chain of kernels."""
        return self.habits.update_traffic / TORCH_UPDATE

    @property
    def narrow_gradients(self) -> bool:
        """Whether gradients are added up and travel in the 16 bits of the computation."""
        return max(self.habits.gradient_bytes, self.habits.reduced_bytes) == 2

    @property
    def summed(self) -> float:
        """Bytes of an element of the sums to which products of gradients add (0: to none)."""
        return float(self.habits.gradient_bytes) if self.habits.fused_accumulation else 0.0

    @property
    def fuses(self) -> bool:
        """Whether each pointwise body is one kernel."""
        return self.habits.fused or self.habits.compiled or self.name == OWN

    @property
    def moment(self) -> float | None:
        """Bytes of an element of each of the optimizer's tensors; None: as it is stored."""
        return None if self.name == OWN else (self.habits.state_bytes - MASTER) / 2

    @property
    def saving(self) -> Saving:
        """How its kernels save for the backward pass."""
        if self.name == OWN:
            return TORCH
        return Saving(fused=self.habits.fused, scores=LOSSES[self.habits.loss].at_most)

    def takes(self, action: str) -> bool:
        """Whether an action of `HOST_ACTIONS` takes its host what was measured on the own runtime.

        Torch's dispatcher takes the host of every eager framework its time for an operator; what
        else was measured is this project's own runtime.
        """
        known = action in HOST_ACTIONS
        return known and (self.name == OWN or (action == "operator" and not self.habits.compiled))

    def hides(self, *, per_pass: bool) -> tuple[bool, bool]:
        """Whether gathers, and reductions, run under computation.

        `per_pass`: those of every pass (ZeRO 3), not those of once a step.
        """
        habits = self.habits
        if per_pass:
            return habits.prefetch, habits.prefetch
        return habits.overlap_gather or habits.whole_stages, habits.overlap_gradients


AUTOPAR = Framework(
    name=OWN,
    habits=Habits(
        overlap_gradients=True,
        overlap_gather=True,
        overlap_sends=True,
        scatter_sends=False,
        by_layer=False,
        casts_gradients=True,
        update_traffic=TORCH_UPDATE,
    ),
    kernels=Kernels(dispatcher=""),
)
"""This project's own runtime.

Units of parameters are gathered ahead and gradients reduced after them, AdamW is that of torch
over float32 masters.
"""
