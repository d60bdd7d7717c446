"""Bounds: seconds of a step that no plan of a candidate undercuts.

In: candidates. Out: lower bounds, from the arithmetic alone up to solutions within the memory.
"""

from .by_mesh import Bounds
from .proof import Proof

__all__ = ["Bounds", "Proof"]
