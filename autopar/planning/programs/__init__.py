"""Solutions as programs.

In: a solution of tables, of the folded graph or of the whole one. Out: its program, priced to the
last collective, with equal layers treated alike where that costs nothing; and the plan written.
"""

from .priced_program import PricedProgram
from .writing import as_plan

__all__ = ["PricedProgram", "as_plan"]
