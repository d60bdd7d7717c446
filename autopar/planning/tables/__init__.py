"""The tables of a candidate: what every choice costs in seconds and bytes.

In: an analysis, the prices of a mesh, and the multiplicities of a step. Out: `Tables`, a cost graph
for `autopar.search` whose variables are operators, parameters and layouts of shared values; and the
way back, from a solution's choices to decisions.
"""

from .build import build_tables
from .decoding import decode
from .requested import requested_tables
from .tables import Tables

__all__ = ["Tables", "build_tables", "decode", "requested_tables"]
