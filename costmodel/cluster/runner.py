"""`Runner`: the framework that runs a plan, by its habits on which the plan's price depends.

A cluster has one (`Cluster.runner`), so whatever is priced on it is priced as that framework runs
it: tables, bounds, played programs and all that explains them. `costmodel/known/frameworks.py`
makes them from the habits that were read in sources.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopar.costmodel.device.host_actions import HOST_ACTIONS

OWN = "autopar"
"""The name of this project's own runtime, the only one that `autopar calibrate` measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A framework that runs plans.

    `attention`: its kernel. `gathers`, `gradients`: whether gathers of parameters, and reductions
    of gradients, that are done once a step run under computation; `passes`: whether those of every
    pass do (ZeRO 3). `update`: bytes that an optimizer's step moves, as a share of those of torch's
    chain of kernels. `actions`: those of `HOST_ACTIONS` that take its host the seconds that were
    measured on the own runtime. `narrow_gradients`: gradients are added up and travel in the 16
    bits of the computation. `fuses`: a compiler makes one kernel of each pointwise body.
    """

    name: str = OWN
    attention: str = "flash2"
    gathers: bool = True
    gradients: bool = True
    passes: bool = True
    update: float = 1.0
    actions: frozenset[str] = frozenset(HOST_ACTIONS)
    narrow_gradients: bool = False
    fuses: bool = True

    def hides(self, *, per_pass: bool) -> tuple[bool, bool]:
        """Whether gathers, and reductions, run under computation; `per_pass`: those of ZeRO 3."""
        return (self.passes, self.passes) if per_pass else (self.gathers, self.gradients)
