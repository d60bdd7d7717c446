"""Stand-ins for parameters of other stages.

Lists of parameters have every parameter of the model on every rank: shapes and names are true,
values are not there.
"""

from .elsewhere import Elsewhere, Holders, Origin, stand_in
from .gradient_figures import Figures
from .optimizer_steps import pass_over_stand_ins

__all__ = ["Elsewhere", "Figures", "Holders", "Origin", "pass_over_stand_ins", "stand_in"]
