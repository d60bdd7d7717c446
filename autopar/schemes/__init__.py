"""Schemes known by name.

A scheme restricts the search, and names a plan that was searched.
"""

from .axis import AxisScheme
from .axis_schemes import AXIS_SCHEMES
from .known import SCHEMES, Scheme, scheme_named
from .naming import Named, scheme_of, stages_of
from .recipes import scheme_text, usual_recipes
from .wording import Factor

__all__ = [
    "AXIS_SCHEMES",
    "SCHEMES",
    "AxisScheme",
    "Factor",
    "Named",
    "Scheme",
    "scheme_named",
    "scheme_of",
    "scheme_text",
    "stages_of",
    "usual_recipes",
]
