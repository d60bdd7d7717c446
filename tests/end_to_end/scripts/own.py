"""A model with an operator of its own, and a plan of it whose file says something false of that
operator.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import plan_loaded
from autopar.frontends.load import ModelOptions, load_model
from autopar.plan import Plan
from autopar.sharding.rules import RULES
from autopar.sharding.rules.discovered import DiscoveredRule, add_found, signature
from autopar.sharding.rules.registry import Call
from tests.end_to_end.scripts.models import BATCH, WIDTH


@torch.library.custom_op("autopar_scripts::centred", mutates_args=())
def centred(x: Tensor) -> Tensor:
    """x without the mean of its last dim, which must stay whole."""
    return x - x.mean(-1, keepdim=True)


centred.register_fake(torch.empty_like)
centred.register_autograd(lambda _, ahead: ahead - ahead.mean(-1, keepdim=True))
KIND = "autopar_scripts.centred.default"


class Centring(nn.Module):
    """Two linear layers around the operator; it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, 4)

    def forward(self, x: Tensor) -> Tensor:
        """The mean square of the output."""
        return F.mse_loss(
            self.down(centred(self.up(x))), torch.zeros((), dtype=x.dtype).expand(BATCH, 4)
        )


def inputs() -> tuple[Tensor]:
    """A batch."""
    return (
        torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    )


def module() -> nn.Module:
    """The model."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Centring().double()


def plan_with_a_false_rule() -> Plan:
    """It splits the dim of the mean, which the rule in its file allows; the table of this process
    does not keep the rule.
    """
    model = load_model(module(), ModelOptions(train=True), inputs())
    (operator,) = (op for op in model.graph.operators if op.kind == KIND)
    add_found(
        [
            DiscoveredRule(
                kind=KIND, signature=signature(Call.of(model.graph, operator)), rule="* h -> * h"
            )
        ]
    )
    try:
        plan = plan_loaded(
            model, devices=2, cluster="local-cpu", pins=[f"{operator.name}=rank:h"]
        ).plan
    finally:
        del RULES[KIND]
    assert plan.rules and plan.operators[operator.name].strategy == ("h",)
    return Plan.model_validate_json(plan.to_json())
