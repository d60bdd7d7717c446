"""Random numbers by counter.

A seed, a step and places in a tensor come in, the same draws as on one device go out.
"""

from .counter_bits import Region
from .distributions import Source
from .draw_state import Draws, drawing
from .generator_states import GeneratorStates

__all__ = ["Draws", "GeneratorStates", "Region", "Source", "drawing"]
