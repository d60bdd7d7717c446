"""Schemes known by name: what each leaves to choose (a restriction of the search), and which of them a plan found is."""

from .axis import AXIS_SCHEMES, AxisScheme
from .known import SCHEMES, Scheme, scheme_named

__all__ = ["AXIS_SCHEMES", "SCHEMES", "AxisScheme", "Scheme", "scheme_named"]
