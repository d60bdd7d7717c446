"""Stand-ins for parameters of other stages.

Lists of parameters have every parameter of the model on every rank: shapes and names are true,
values are not there.
"""

from .elsewhere import Elsewhere, Holders, Origin
from .gradient_figures import Figures
from .optimizer_steps import pass_over_stand_ins
from .stand_in import StandIn

__all__ = ["Elsewhere", "Figures", "Holders", "Origin", "StandIn", "pass_over_stand_ins"]
